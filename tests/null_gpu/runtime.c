// CUDA's runtime (libcudart) for a GPU that does not exist. Device memory is address space of this process. It is
// counted, but takes real memory only where something is written. Copies of up to NULL_GPU_COPY_MIB are made; kernels
// do nothing.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
#define ALIGNMENT (2 * MIB)

// ---------------------------------------------------------------------------------------------------------------------
// Memory. The driver's library (driver.c) counts its own allocations here too.

typedef struct { char *start; size_t size; int pinned; } Block;
static Block blocks[1 << 18];
static int n_blocks;
static size_t used, pinned;
static long launches, synchronizations;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double setting(const char *name, double otherwise) {
  const char *text = getenv(name);
  return text ? atof(text) : otherwise;
}

static size_t capacity(void) { return setting("NULL_GPU_GIB", 79.1) * GIB; }
static size_t largest_copy(void) { return setting("NULL_GPU_COPY_MIB", 64) * MIB; }

static void *reserve(size_t size) {
  return mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

EXPORT int null_gpu_take(long size) {  // returns 0 if it fits; a negative size gives memory back
  pthread_mutex_lock(&lock);
  int full = size > 0 && used + size > capacity();
  if (!full) used += size;
  pthread_mutex_unlock(&lock);
  return full;
}

static void add_block(void *start, size_t size, int pinned) {
  pthread_mutex_lock(&lock);
  blocks[n_blocks++] = (Block){start, size, pinned};
  pthread_mutex_unlock(&lock);
}

EXPORT void null_gpu_add_block(void *start, size_t size) { add_block(start, size, 0); }

EXPORT size_t null_gpu_remove_block(void *start) {  // returns its size
  size_t size = 0;
  pthread_mutex_lock(&lock);
  for (int i = n_blocks - 1; i >= 0; i--)
    if (blocks[i].start == start) {
      size = blocks[i].size;
      blocks[i] = blocks[--n_blocks];
      break;
    }
  pthread_mutex_unlock(&lock);
  if (size) madvise(start, size, MADV_DONTNEED);
  return size;
}

EXPORT void null_gpu_count_launch(void) { launches++; }
EXPORT long null_gpu_launches(void) { return launches; }
EXPORT long null_gpu_synchronizations(void) { return synchronizations; }
EXPORT size_t null_gpu_pinned_bytes(void) { return pinned; }

cudaError_t cudaMalloc(void **pointer, size_t size) {
  if (null_gpu_take(size)) return cudaErrorMemoryAllocation;
  char *start = reserve(size + ALIGNMENT);
  if (start == MAP_FAILED) return cudaErrorMemoryAllocation;
  *pointer = (void *)(((size_t)start + ALIGNMENT - 1) & ~(ALIGNMENT - 1));
  null_gpu_add_block(*pointer, size);
  return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
  if (pointer) null_gpu_take(-(long)null_gpu_remove_block(pointer));
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) { return cudaMalloc(pointer, size); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *total = capacity();
  *free = *total - used;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->hostPointer = (void *)pointer;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_blocks; i++)
    if ((char *)pointer >= blocks[i].start && (char *)pointer < blocks[i].start + blocks[i].size) {
      attributes->type = blocks[i].pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
      attributes->devicePointer = (void *)pointer;
      attributes->hostPointer = blocks[i].pinned ? (void *)pointer : 0;
    }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
  *pointer = reserve(size);
  if (*pointer == MAP_FAILED) return cudaErrorMemoryAllocation;
  add_block(*pointer, size, 1);
  pinned += size;
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }

cudaError_t cudaFreeHost(void *pointer) {
  if (!pointer) return cudaSuccess;
  size_t size = null_gpu_remove_block(pointer);
  pinned -= size;
  munmap(pointer, size);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
  *device = host;
  return cudaSuccess;
}

static cudaError_t copy(void *to, const void *from, size_t size) {
  if (size <= largest_copy()) memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  synchronizations++;
  return copy(to, from, size);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, size);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t stream) {
  return copy(to, from, size);
}

cudaError_t cudaMemset(void *to, int value, size_t size) {
  if (size <= largest_copy()) memset(to, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { return cudaMemset(to, value, size); }

// ---------------------------------------------------------------------------------------------------------------------
// NULL_GPU_COUNT devices, each like an H100

static __thread int current;

static int device_count(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return setting("NULL_GPU_COUNT", 1);
  int n = *visible != 0;
  for (; *visible; visible++) n += *visible == ',';
  return n;
}

cudaError_t cudaGetDeviceCount(int *n) {
  *n = device_count();
  return *n ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device >= device_count()) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->totalGlobalMem = capacity();
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->reservedSharedMemPerBlock = 1024;
  p->l2CacheSize = 50 * MIB;
  p->totalConstMem = 65536;
  p->textureAlignment = 512;
  p->memoryBusWidth = 5120;
  p->unifiedAddressing = p->concurrentKernels = p->managedMemory = p->cooperativeLaunch = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY:
      *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }
const char *cudaGetErrorString(cudaError_t error) { return "an error of the null GPU"; }
const char *cudaGetErrorName(cudaError_t error) { return "null_gpu_error"; }

// ---------------------------------------------------------------------------------------------------------------------
// Streams and events: their handles are numbers

static size_t next_handle = 0x1000;
static void *handle(void) { return (void *)(next_handle += 16); }

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  *stream = handle();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return cudaStreamCreate(stream);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *n) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (n) *n = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  synchronizations++;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) { return cudaStreamSynchronize(0); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaStreamSynchronize(0); }

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  *event = handle();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t a, cudaEvent_t b) {
  *milliseconds = 1;
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
  launches++;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t stream) {
  launches++;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **args) {
  launches++;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *function, int block, size_t shared) {
  *n = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *function, int block, size_t shared,
                                                                   unsigned flags) {
  *n = 2;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
  static char nothing[1 << 20];
  *pointer = nothing;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **pointer, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  void *library = dlopen("libcuda.so.1", RTLD_LAZY);
  *pointer = library ? dlsym(library, name) : 0;
  if (result) *result = *pointer ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *pointer ? cudaSuccess : cudaErrorSymbolNotFound;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  *pool = (cudaMemPool_t)0x10;
  return cudaSuccess;
}

// Code that nvcc generates calls these: to register a program's kernels, and to pass the configuration of each launch
static void *fat_binary;
void **__cudaRegisterFatBinary(void *binary) { return &fat_binary; }
void __cudaRegisterFatBinaryEnd(void **binary) {}
void __cudaUnregisterFatBinary(void **binary) {}
char __cudaInitModule(void **binary) { return 1; }
void __cudaRegisterFunction(void **a, const char *b, char *c, const char *d, int e, void *f, void *g, void *h, void *i,
                            int *j) {}
void __cudaRegisterVar(void **a, char *b, char *c, const char *d, int e, size_t f, int g, int h) {}
cudaError_t __cudaGetKernel(void **kernel, const void *function) {
  *kernel = (void *)function;
  return cudaSuccess;
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void **)stream = configuration.stream;
  return cudaSuccess;
}

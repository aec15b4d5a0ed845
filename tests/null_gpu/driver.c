// CUDA's driver (libcuda) for a GPU that does not exist: the functions that Triton, torch's expandable segments and
// vLLM's sleep allocator call. Kernels do nothing. Memory is counted together with that of runtime.c.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

int null_gpu_take(long size);
void null_gpu_add_block(void *start, size_t size);
size_t null_gpu_remove_block(void *start);
void null_gpu_count_launch(void);
int cudaGetDeviceCount(int *n);
int cudaMemGetInfo(size_t *free, size_t *total);

#define GRANULARITY ((size_t)2 << 20)
static size_t next_handle = 0x4000000;
static size_t handle(void) { return next_handle += 16; }

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDeviceGet(CUdevice *device, int i) {
  *device = i;
  return 0;
}
CUresult cuDeviceGetCount(int *n) { return cudaGetDeviceCount(n) ? CUDA_ERROR_NO_DEVICE : 0; }
CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return 0;
}
CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
  snprintf(name, size, "NVIDIA H100 80GB HBM3");
  return 0;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)0x10;
  return 0;
}
CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return 0;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return 0;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the null GPU's driver";
  return 0;
}
CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 1 << 20;
  return 0;
}
CUresult cuMemGetInfo(size_t *free, size_t *total) { return cudaMemGetInfo(free, total); }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 2619000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 5120; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    default: *value = 1;
  }
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels that are compiled at run time

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)handle();
  return 0;
}
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) {
  return cuModuleLoadData(module, image);
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)handle();
  return 0;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr *)data = pointer;
  else
    *(int *)data = 0;
  return 0;
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction function, const CUlaunchConfig *config) {
  *n = 16;
  return 0;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction function, int block, size_t shared) {
  *n = 2;
  return 0;
}
CUresult cuLaunchKernel(CUfunction function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f,
                        unsigned shared, CUstream stream, void **parameters, void **extra) {
  null_gpu_count_launch();
  return 0;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  null_gpu_count_launch();
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Address space and memory are separate. A memory handle is its size, with a number that makes each handle unique

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
  *size = GRANULARITY;
  return 0;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr at, unsigned long long flags) {
  char *start = mmap(0, size + GRANULARITY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = ((size_t)start + GRANULARITY - 1) & ~(GRANULARITY - 1);
  return 0;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *memory, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
  if (null_gpu_take(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  static unsigned long long number = 0;
  *memory = size / GRANULARITY << 32 | ++number;
  return 0;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle memory) {
  null_gpu_take(-(long)((memory >> 32) * GRANULARITY));
  return 0;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle memory,
                  unsigned long long flags) {
  null_gpu_add_block((void *)pointer, size);
  return 0;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {  // the range may span several blocks
  for (size_t done = 0; done < size;) {
    size_t block = null_gpu_remove_block((void *)(pointer + done));
    done += block ? block : GRANULARITY;
  }
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------

CUresult cuGetProcAddress_v2(const char *name, void **pointer, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *result) {
  void *library = dlopen("libcuda.so.1", RTLD_LAZY);
  *pointer = library ? dlsym(library, name) : 0;
  if (result) *result = *pointer ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *pointer ? 0 : CUDA_ERROR_NOT_FOUND;
}

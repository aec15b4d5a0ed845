// NVML, from which torch and vLLM read facts about the device.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cudaMemGetInfo(size_t *free, size_t *total);

int nvmlDeviceGetCount_v2(unsigned *n) {  // all of the machine's: NVML ignores CUDA_VISIBLE_DEVICES
  const char *text = getenv("NULL_GPU_COUNT");
  *n = text ? atoi(text) : 1;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **device) {
  unsigned n;
  nvmlDeviceGetCount_v2(&n);
  *device = (void *)0x10;
  return i < n ? 0 : 2;  // NVML_ERROR_INVALID_ARGUMENT
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return nvmlDeviceGetHandleByIndex_v2(0, device); }
int nvmlDeviceGetHandleByUUID(const char *id, void **device) { return nvmlDeviceGetHandleByIndex_v2(0, device); }
int nvmlDeviceGetName(void *device, char *name, unsigned size) {
  snprintf(name, size, "NVIDIA H100 80GB HBM3");
  return 0;
}
int nvmlDeviceGetUUID(void *device, char *name, unsigned size) {
  snprintf(name, size, "GPU-00000000-0000-0000-0000-000000000000");
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  *major = 9;
  return *minor = 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = 13000;
  return 0;
}
int nvmlSystemGetDriverVersion(char *version, unsigned size) {
  snprintf(version, size, "580.00");
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {  // total, free, used
  size_t free, total;
  cudaMemGetInfo(&free, &total);
  memory[0] = total;
  memory[1] = free;
  memory[2] = total - free;
  return 0;
}
const char *nvmlErrorString(int error) { return "an error of the null GPU's NVML"; }

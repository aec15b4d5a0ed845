// NVRTC, with which torch compiles a few of its own kernels at run time, such as prod of integers. Each compiled
// program is one zero byte.
#include <stddef.h>

int nvrtcVersion(int *major, int *minor) {
  *major = 13;
  return *minor = 0;
}
int nvrtcCreateProgram(void **program, const char *source, const char *name, int n, const char **a, const char **b) {
  *program = (void *)0x10;
  return 0;
}
int nvrtcGetCUBINSize(void *program, size_t *size) {
  *size = 1;
  return 0;
}
int nvrtcGetPTXSize(void *program, size_t *size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetProgramLogSize(void *program, size_t *size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetCUBIN(void *program, char *code) { return *code = 0; }
int nvrtcGetPTX(void *program, char *code) { return *code = 0; }
int nvrtcGetProgramLog(void *program, char *log) { return *log = 0; }
int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) {
  *lowered = "kernel";
  return 0;
}
const char *nvrtcGetErrorString(int error) { return "an error of the null GPU's NVRTC"; }

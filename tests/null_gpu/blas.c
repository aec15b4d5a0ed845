// cuBLAS and cuBLASLt for a GPU that does not exist: handles are numbers, and matrix products are not computed.
#include <string.h>

static unsigned long next_handle = 0x2000;
static int give_handle(void **pointer) {
  *pointer = (void *)(next_handle += 16);
  return 0;
}

int cublasCreate_v2(void **handle) { return give_handle(handle); }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }
unsigned long cublasLtGetVersion(void) { return 130000; }
int cublasLtCreate(void **handle) { return give_handle(handle); }
int cublasLtMatmulDescCreate(void **handle, int compute, int scale) { return give_handle(handle); }
int cublasLtMatrixLayoutCreate(void **handle, int type, unsigned long rows, unsigned long columns, long stride) {
  return give_handle(handle);
}
int cublasLtMatmulPreferenceCreate(void **handle) { return give_handle(handle); }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *n) {
  memset(results, 0, 96);  // cublasLtMatmulHeuristicResult_t: the first algorithm, no workspace, success
  *n = 1;
  return 0;
}

// An extension as inference servers bring them. It is linked with the runtime alone, and calls a function of cuBLAS that PyTorch does not
// import, a function of the driver that is newer than the simulation, and asks the driver for that by its name.
#include <stddef.h>

int cublasNewGemm(void);
int cuNewSet(void *object);
int cuNewGet(void *object);
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status);
int cudaGetDeviceCount(int *count);

int call(int *statuses)
{
    void *function = NULL;
    int count = 0, status = 0;
    cudaGetDeviceCount(&count);
    statuses[0] = cublasNewGemm();
    statuses[1] = cuNewSet(&count);
    statuses[1] += cuNewSet(&count);
    statuses[2] = cuNewGet(&count);
    statuses[3] = cuGetProcAddress_v2("cuNewSet", &function, 13000, 0, &status);
    statuses[4] = status;
    return function == NULL;
}

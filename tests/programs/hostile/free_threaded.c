// A process whose symbols are those of a free-threaded CPython: VERSION is what Py_GetVersion returns. With FLAG, only
// the offsets that the interpreter publishes (`_Py_DebugOffsets`, at the start of `_PyRuntime`) say so. Calls of any
// other function of CPython would crash, because there are none.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

const char *Py_GetVersion(void) { return VERSION; }
void *PyGILState_GetThisThreadState(void) { return NULL; }
int PyCode_Addr2Line(void *code, int offset) { (void)code; return offset; }
char PyCode_Type[512], PyFrame_Type[512], PyUnicode_Type[512], PyBytes_Type[512];
#ifdef FLAG
// The cookie "xdebugpy", PY_VERSION_HEX of 3.13.0, and the flag.
uint64_t _PyRuntime[512] = {0x7970677562656478, 0x030d00f0, 1};
#endif

int main(void) {
    for (size_t i = 1; i <= 100; i++) {
        void *memory;
        if (cudaMalloc(&memory, i << 12) != 0 || cudaFree(memory) != 0) return 71;
    }
    printf("fine\n");
    return 0;
}

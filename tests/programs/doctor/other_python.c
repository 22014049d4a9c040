/* A process whose symbols claim a CPython version that does not exist yet. PyTorch's CPU allocator
 * reports one block in it. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

const char *Py_GetVersion(void) { return "3.99.0 (main, Jan  1 2099, 00:00:00) [GCC 99.0.0]"; }
void *PyGILState_GetThisThreadState(void) { return NULL; }
int PyCode_Addr2Line(void *code, int offset) { (void)code; return offset; }
char PyCode_Type[512], PyFrame_Type[512], PyUnicode_Type[512], PyBytes_Type[512];

int main(void) {
    typedef void report(void *, int64_t, size_t, size_t, uint16_t);
    report *hook = (report *)dlsym(RTLD_DEFAULT, "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE");
    if (!hook)
        return 3;
    hook((void *)4096, 64, 0, 0, 0xff00);
    return 0;
}

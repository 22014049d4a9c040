// `holder MIB`: allocates as much on the device, and holds it until its standard input ends.
#include "../cuda/calls.h"
#include <unistd.h>

DRIVER_CALLS(DRIVER_POINTER)

int main(int argc, char **argv) {
    address context, memory;
    char byte = '.';
    (void)argc;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 3;
    if (cuMemAlloc(&memory, strtoul(argv[1], NULL, 10) << 20)) return 4;
    if (write(1, &byte, 1) != 1) return 5;
    while (read(0, &byte, 1) > 0) {}
    return 0;
}

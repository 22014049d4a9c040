// A handle of CUDA IPC as hexadecimal digits, for the command line of another process. Needs calls.h.
#include <stdio.h>

enum { HANDLE_BYTES = 64, HANDLE_DIGITS = 2 * HANDLE_BYTES };

static void write_handle(const ipc_handle *handle, char digits[HANDLE_DIGITS + 1]) {
    for (int i = 0; i < HANDLE_BYTES; i++) sprintf(digits + 2 * i, "%02x", (unsigned char)handle->bytes[i]);
}

static ipc_handle read_handle(const char *digits) {
    ipc_handle handle;
    for (int i = 0; i < HANDLE_BYTES; i++) {
        unsigned byte;
        sscanf(digits + 2 * i, "%2x", &byte);
        handle.bytes[i] = (char)byte;
    }
    return handle;
}

// `embed PROGRAM`: embeds Python. Starts the interpreter, runs the program and ends the interpreter, three times.
// Allocates before, between and after. Linked with libpython and a runtime.
#include <Python.h>
#include <stdio.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

static void allocate(size_t size) {
    void *memory;
    if (cudaMalloc(&memory, size) != 0 || cudaFree(memory) != 0) exit(71);
}

static PyObject *allocate_from_python(PyObject *self, PyObject *size) {
    (void)self;
    allocate(PyLong_AsSize_t(size));
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {{"allocate", allocate_from_python, METH_O, ""}, {0}};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "embedding", "", -1, METHODS, 0, 0, 0, 0};
static PyObject *make_module(void) { return PyModule_Create(&MODULE); }

int main(int argc, char **argv) {
    (void)argc;
    allocate(4096);
    PyImport_AppendInittab("embedding", make_module);
    for (int round = 0; round < 3; round++) {
        Py_Initialize();
        FILE *program = fopen(argv[1], "r");
        if (!program || PyRun_SimpleFile(program, argv[1]) != 0) return 72;
        fclose(program);
        allocate(8192);
        if (Py_FinalizeEx() != 0) return 73;
        allocate(12288);
    }
    printf("fine\n");
    return 0;
}

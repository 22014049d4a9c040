// An extension of a package that imports a function of the CUDA runtime which PyTorch does not. With RUNTIME, the runtime against
// which it is linked.
#ifdef RUNTIME
int cudaOfNewerPackages(int value) { return value; }
#else
int cudaOfNewerPackages(int value);
int call(void) { return cudaOfNewerPackages(7); }
#endif

/* MarianoJT88/PD-Flow#7 (and ggml-org/llama.cpp#5576).
 * Scene flow over a video: buffers of each level are allocated for every frame, and release_frame() forgets two of them.
 * Cause: color and depth of the warped level are never freed. Fix: free them (-DFREES_COLOR, -DFREES_DEPTH).
 * Truth: 40 frames x (level sizes) of two float buffers; printed by the program.
 */
#include <stdio.h>
#include <stdlib.h>

typedef int cudaError_t;
cudaError_t cudaMalloc(void **, size_t);
cudaError_t cudaFree(void *);
cudaError_t cudaMemset(void *, int, size_t);

#define LEVELS 5
#ifndef FRAMES
#define FRAMES 40
#endif
#define CHECK(call) do { if (call) { fprintf(stderr, "%s failed\n", #call); exit(1); } } while (0)

struct frame { float *color[LEVELS], *depth[LEVELS], *color_warped, *depth_warped; };

static size_t in_use, most;
static void *device(size_t bytes) {
    void *pointer;
    CHECK(cudaMalloc(&pointer, bytes));
    in_use += bytes;
    if (in_use > most) most = in_use;
    return pointer;
}
static void drop(void *pointer, size_t bytes) { CHECK(cudaFree(pointer)); in_use -= bytes; }

static void allocate_frame(struct frame *f, int width, int height) {
    size_t bytes = (size_t)width * height * sizeof(float);
    f->color_warped = device(bytes);
    f->depth_warped = device(bytes);
    for (int level = 0; level < LEVELS; level++) {
        f->color[level] = device(bytes >> (2 * level));
        f->depth[level] = device(bytes >> (2 * level));
    }
}

static void release_frame(struct frame *f, int width, int height) {
    size_t bytes = (size_t)width * height * sizeof(float);
    for (int level = 0; level < LEVELS; level++) {
        drop(f->color[level], bytes >> (2 * level));
        drop(f->depth[level], bytes >> (2 * level));
    }
#ifdef FREES_COLOR
    drop(f->color_warped, bytes);
#endif
#ifdef FREES_DEPTH
    drop(f->depth_warped, bytes);
#endif
}

static void solve(struct frame *f, int width, int height) { CHECK(cudaMemset(f->color[0], 0, (size_t)width * height)); }

int main(void) {
    for (int number = 0; number < FRAMES; number++) {
        struct frame f;
        allocate_frame(&f, 1280, 960);
        solve(&f, 1280, 960);
        release_frame(&f, 1280, 960);
    }
    printf("TRUTH peak=%.1f end=%.1f MiB\n", most / 1048576.0, in_use / 1048576.0);
    return 0;
}

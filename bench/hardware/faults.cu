// Three application faults, one per run, as a user's program causes them: the kernel log then says Xid 31, 13 or 43.
// usage: faults unmapped | misaligned | trap      (exits 0 when the fault came back as a CUDA error, which is expected)
#include <cstdio>
#include <cstring>

__global__ void unmapped() { *reinterpret_cast<volatile int *>(0x7f0000000000ULL) = 1; }

__global__ void misaligned(char *p) { *reinterpret_cast<volatile long long *>(p + 1) = 1; }

__global__ void trapped() { asm volatile("trap;"); }

int main(int argc, char **argv) {
  if (argc != 2) return 2;
  char *p = nullptr;
  if (cudaMalloc(&p, 4096) != cudaSuccess) {
    fprintf(stderr, "no usable GPU: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 3;
  }
  if (!strcmp(argv[1], "unmapped")) unmapped<<<1, 1>>>();
  else if (!strcmp(argv[1], "misaligned")) misaligned<<<1, 1>>>(p);
  else if (!strcmp(argv[1], "trap")) trapped<<<1, 1>>>();
  else return 2;
  cudaError_t e = cudaDeviceSynchronize();
  fprintf(stderr, "%s: %s\n", argv[1], cudaGetErrorString(e));
  return e == cudaSuccess ? 1 : 0;
}

#include <atomic>

#include "common.cuh"

namespace mor {

__global__ void nothing() {}

std::string device_refusal() {
  // what is loaded for a kernel is machine code of this architecture, or what the driver makes of embedded PTX
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, nothing);
  if (error == cudaSuccess) return "";
  cudaGetLastError();
  return cudaGetErrorString(error);
}

const Device& device() {
  constexpr int kMost = 64;
  static Device known[kMost];
  static std::atomic<bool> there[kMost];
  int index;
  check(cudaGetDevice(&index), "cudaGetDevice");
  if (index >= kMost) throw std::runtime_error("device: expected an index below 64");
  if (!there[index]) {  // threads that come at once write the same
    Device found;
    check(cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, index), "device");
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, nothing), "device");
    int driver;
    check(cudaDriverGetVersion(&driver), "device");
    // older drivers can't put such launches into a CUDA graph; older code has no await_previous()
    found.early = driver >= 12030 && attributes.ptxVersion >= 90;
    found.clusters = attributes.ptxVersion >= 90;
    known[index] = found;
    there[index] = true;
  }
  return known[index];
}

}  // namespace mor

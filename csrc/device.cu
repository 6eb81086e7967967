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

}  // namespace mor

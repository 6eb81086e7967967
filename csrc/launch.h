// The launchers, as bind.cpp shows them to Python: one or a few a file of kernels. Addresses are of device memory, 0 for
// none; sizes and strides count elements. Each launches on `stream` and returns at once; it throws if it can't.
#pragma once

#include <cstdint>
#include <string>

namespace mor {

using Address = std::uintptr_t;

enum Dtype { kF32 = 0, kBF16 = 1, kF16 = 2, kE4M3 = 3 };
enum Activation { kNone = 0, kSigmoid = 1, kTanh = 2 };
enum Residual { kBlock = 0, kDelta = 1, kPlain = 2 };

// device.cu
std::string device_refusal();  // why no kernel of this build can run on the current device; empty if they can

// gather.cu
void gather(Address x, Address indices, Address rows, int64_t n, int64_t length, int64_t x_m, int64_t x_d, int width,
            int dtype, Address stream);
void gather_backward(Address d_rows, Address indices, Address inverse, Address d_x, int64_t n, int64_t length, int width,
                     int dtype, Address stream);
void invert(Address indices, Address inverse, int64_t batch, int64_t k, int64_t length, Address stream);

}  // namespace mor

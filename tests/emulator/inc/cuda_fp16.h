#pragma once
#include <cuda_runtime.h>
struct __half { uint16_t b; };
inline float __half2float(__half x){_Float16 h; memcpy(&h,&x,2); return float(h);}
inline __half __float2half_rn(float f){_Float16 h=f; __half o; memcpy(&o,&h,2); return o;}
struct alignas(4) __half2{__half x,y;};
inline __half2 __floats2half2_rn(float a,float b){return {__float2half_rn(a),__float2half_rn(b)};}
inline __half __ushort_as_half(uint16_t x){return {x};}

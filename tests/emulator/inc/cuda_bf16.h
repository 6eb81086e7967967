#pragma once
#include <cuda_runtime.h>
struct __nv_bfloat16 { uint16_t b; };
inline float __bfloat162float(__nv_bfloat16 x){return __uint_as_float(unsigned(x.b)<<16);}
inline __nv_bfloat16 __float2bfloat16_rn(float f){unsigned u=__float_as_uint(f); if(f!=f) return {0x7fff}; u+=0x7fff+((u>>16)&1); return {uint16_t(u>>16)};}
struct alignas(4) __nv_bfloat162{__nv_bfloat16 x,y;};
inline __nv_bfloat162 __floats2bfloat162_rn(float a,float b){return {__float2bfloat16_rn(a),__float2bfloat16_rn(b)};}

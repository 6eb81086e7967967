#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <functional>
#include <vector>
#include <tuple>
#include <ucontext.h>
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__
struct dim3 { unsigned x,y,z; dim3(unsigned a=1,unsigned b=1,unsigned c=1):x(a),y(b),z(c){} };
struct alignas(8) int2{int x,y;}; struct alignas(16) int4{int x,y,z,w;};
struct alignas(8) uint2{unsigned x,y;}; struct alignas(16) uint4{unsigned x,y,z,w;};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline const char* cudaGetErrorString(cudaError_t){return "";}
inline cudaError_t cudaGetLastError(){return cudaSuccess;}
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute { cudaLaunchAttributeID id; struct { int programmaticStreamSerializationAllowed; } val; };
struct cudaLaunchConfig_t { dim3 gridDim, blockDim; size_t dynamicSmemBytes; cudaStream_t stream; cudaLaunchAttribute* attrs; unsigned numAttrs; };
namespace emu {
struct Fiber { ucontext_t ctx; std::vector<char> stack; bool done, waiting; long gen; };
inline ucontext_t main_ctx; inline std::vector<Fiber*> fibers; inline int cur; inline std::function<void()> body;
inline std::vector<uint64_t> slots; inline std::vector<int> arrived_warp; inline std::vector<long> gen_warp; inline int arrived_block, alive; inline long gen_block;
inline void yield(){ swapcontext(&fibers[cur]->ctx,&main_ctx); }
inline int in_warp(int w){ int n=0; for(int i=w*32;i<(w+1)*32&&i<(int)blockDim.x;i++) n+=!fibers[i]->done; return n; }
inline void warp_barrier(){ int w=cur/32; if(in_warp(w)!=32){fprintf(stderr,"warp collective with %d lanes\n",in_warp(w)); abort();}
  long g=gen_warp[w]; if(++arrived_warp[w]==32){arrived_warp[w]=0;gen_warp[w]++;} else while(gen_warp[w]==g) yield(); }
inline void block_barrier(){ long g=gen_block; if(++arrived_block==(int)blockDim.x){arrived_block=0;gen_block++;} else while(gen_block==g) yield(); }
inline void entry(){ body(); fibers[cur]->done=true; while(true) yield(); }
inline void run(dim3 grid, dim3 block, std::function<void()> f){
  if(grid.x==0||grid.y==0||block.x==0||block.x>1024||grid.y>65535){fprintf(stderr,"bad launch %u %u %u\n",grid.x,grid.y,block.x);abort();}
  gridDim=grid;blockDim=block;body=f;
  while(fibers.size()<block.x){auto*F=new Fiber;F->stack.resize(1<<16);fibers.push_back(F);} slots.resize(1024); 
  for(unsigned by=0;by<grid.y;by++)for(unsigned bx=0;bx<grid.x;bx++){
    blockIdx=dim3(bx,by,0);arrived_warp.assign(32,0);gen_warp.assign(32,0);arrived_block=0;gen_block=0;
    for(unsigned t=0;t<block.x;t++){auto*F=fibers[t];F->done=false;getcontext(&F->ctx);F->ctx.uc_stack.ss_sp=F->stack.data();F->ctx.uc_stack.ss_size=F->stack.size();F->ctx.uc_link=nullptr;makecontext(&F->ctx,entry,0);}
    bool any=true; long rounds=0;
    while(any){any=false; if(++rounds>1000000){fprintf(stderr,"deadlock\n");abort();}
      for(unsigned t=0;t<block.x;t++) if(!fibers[t]->done){any=true;cur=t;threadIdx=dim3(t,0,0);swapcontext(&main_ctx,&fibers[t]->ctx);} }
  }
}
template<class V> V exchange(V v,int src){ static_assert(sizeof(V)<=8); uint64_t b=0; memcpy(&b,&v,sizeof(V)); slots[cur]=b; warp_barrier(); uint64_t r=slots[cur/32*32+(src&31)]; warp_barrier(); V o; memcpy(&o,&r,sizeof(V)); return o; }
}
template<class V> V __shfl_sync(unsigned,V v,int src){return emu::exchange(v,src);}
template<class V> V __shfl_xor_sync(unsigned,V v,int m){return emu::exchange(v,(emu::cur%32)^m);}
inline unsigned __ballot_sync(unsigned,bool p){ unsigned r=0; emu::slots[emu::cur]=p; emu::warp_barrier(); for(int i=0;i<32;i++) r|=unsigned(emu::slots[emu::cur/32*32+i]&1)<<i; emu::warp_barrier(); return r; }
inline void __syncthreads(){emu::block_barrier();}
inline int __ffs(unsigned x){return __builtin_ffs(x);}
template<class V> V __ldcs(const V*p){ if((uintptr_t)p%sizeof(V)){fprintf(stderr,"misaligned load\n");abort();} return *p;}
template<class V> void __stcs(V*p,V v){ if((uintptr_t)p%sizeof(V)){fprintf(stderr,"misaligned store\n");abort();} *p=v;}
inline float __uint_as_float(unsigned x){float f;memcpy(&f,&x,4);return f;}
inline unsigned __float_as_uint(float x){unsigned f;memcpy(&f,&x,4);return f;}
template<class... E,class... A> cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t*c,void(*k)(E...),A&&...a){ auto t=std::tuple<E...>(a...); emu::run(c->gridDim,c->blockDim,[&]{std::apply(k,t);}); return cudaSuccess; }

// mor_kernels._C: the launchers of launch.h. It imports on a machine without a GPU or a driver, and with any torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "launch.h"

PYBIND11_MODULE(_C, m) {
  using namespace mor;
  m.attr("architectures") = MOR_ARCHITECTURES;  // as in CMAKE_CUDA_ARCHITECTURES
  m.attr("cuda") = MOR_CUDA_VERSION;            // of the compiler
  m.def("device_refusal", &device_refusal);
  m.def("decode_linear", &decode_linear);
  m.def("decode_qkv", &decode_qkv);
  m.def("depth_step", &depth_step);
  m.def("gather", &gather);
  m.def("gather_backward", &gather_backward);
  m.def("invert", &invert);
  m.def("route_backward", &route_backward);
  m.def("route_backward_blocks", &route_backward_blocks);
  m.def("scatter_back", &scatter_back);
  m.def("scatter_back_backward", &scatter_back_backward);
  m.def("route", &route);
  m.def("rope", &rope);
  m.def("sample", &sample);
  m.def("kv_append", &kv_append);
  m.def("kv_merge", &kv_merge);
  m.def("kv_lookup", &kv_lookup);
  m.def("kv_lookup_backward", &kv_lookup_backward);
  m.def("attention_schedule", &attention_schedule);
  m.def("paged_attention", &paged_attention);
}

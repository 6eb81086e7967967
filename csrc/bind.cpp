// mor_kernels._C: the launchers of launch.h. It imports on a machine without a GPU or a driver, and with any torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <type_traits>
#include <utility>

#include "launch.h"

namespace mor {
namespace {

// A function of its own: with the conversions inside each launcher's, this file takes as long to compile as a kernel.
template <class T>
[[gnu::noinline]] T as(pybind11::handle argument) {
  try {
    return argument.cast<T>();
  } catch (const pybind11::cast_error&) {
    throw pybind11::type_error("expected " + pybind11::type_id<T>() + ", got " + std::string(pybind11::repr(argument)));
  }
}

template <auto launcher>
struct Call;

template <class R, class... A, R (*launcher)(A...)>
struct Call<launcher> {
  static pybind11::object call(const pybind11::args& arguments) {
    if (arguments.size() != sizeof...(A)) {
      const auto expected = std::to_string(sizeof...(A)), got = std::to_string(arguments.size());
      throw pybind11::type_error("arguments: expected " + expected + ", got " + got);
    }
    return unpack(arguments, std::index_sequence_for<A...>{});
  }

 private:
  template <std::size_t... I>
  static pybind11::object unpack(const pybind11::args& arguments, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) {
      launcher(as<A>(PyTuple_GET_ITEM(arguments.ptr(), I))...);
      return pybind11::none();
    } else {
      return pybind11::cast(launcher(as<A>(PyTuple_GET_ITEM(arguments.ptr(), I))...));
    }
  }
};

template <auto launcher>
void define(pybind11::module_& m, const char* name) {
  m.def(name, &Call<launcher>::call);
}

}  // namespace
}  // namespace mor

PYBIND11_MODULE(_C, m) {
  using namespace mor;
  m.attr("architectures") = MOR_ARCHITECTURES;  // as in CMAKE_CUDA_ARCHITECTURES
  m.attr("cuda") = MOR_CUDA_VERSION;            // of the compiler
  define<device_refusal>(m, "device_refusal");
  define<decode_linear>(m, "decode_linear");
  define<decode_qkv>(m, "decode_qkv");
  define<depth_step>(m, "depth_step");
  define<gather>(m, "gather");
  define<gather_backward>(m, "gather_backward");
  define<invert>(m, "invert");
  define<route_backward>(m, "route_backward");
  define<route_backward_blocks>(m, "route_backward_blocks");
  define<scatter_back>(m, "scatter_back");
  define<scatter_back_backward>(m, "scatter_back_backward");
  define<route>(m, "route");
  define<rope>(m, "rope");
  define<sample>(m, "sample");
  define<kv_append>(m, "kv_append");
  define<kv_merge>(m, "kv_merge");
  define<kv_lookup>(m, "kv_lookup");
  define<kv_lookup_backward>(m, "kv_lookup_backward");
  define<attention_schedule>(m, "attention_schedule");
  define<paged_attention>(m, "paged_attention");
}

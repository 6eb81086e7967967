set -e
cd tests/emulator
python3 - <<'PY'
import re
s=open('./csrc/common.cuh').read()
s=s.replace('#pragma once','#pragma once\n#include "emu.h"',1)
a=s.index('template <class... P, class... A>\nvoid launch('); b=s.index('__device__ __forceinline__ void let_next_begin')
s=s[:a]+'''template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, int threads, int shared, bool early, Address stream, A... arguments) {
  emu::run_grid(grid.x, threads, shared, [=] { kernel(P(arguments)...); });
}
'''+s[b:]
open('common.cuh','w').write(s)
s=open('./csrc/paged_attention.cu').read()
s=re.sub(r'extern __shared__ __align__\(\d+\) char memory\[\];','char* memory = emu::shared_;',s)
a=s.index('  constexpr int kMost = 64;\n  static std::atomic<int> known'); b=s.index('template <class C>\nvoid run(')
s=s[:a]+'  return getenv("EMU_BLOCKS") ? atoi(getenv("EMU_BLOCKS")) : 3;\n}\n\n'+s[b:]
s=s.replace('device().multiprocessors','1')
open('paged.cpp','w').write('#include "emu.h"\n'+s)
open('mod.cpp','w').write('''#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include "./csrc/launch.h"
PYBIND11_MODULE(_C, m) { using namespace mor; m.def("attention_schedule", &attention_schedule); m.def("paged_attention", &paged_attention); }
''')
PY
cp ./csrc/launch.h .
PY=./.venv/bin/python
INC="-I. -I/usr/local/cuda/include $($PY -m pybind11 --includes)"
g++ -std=c++17 -O2 -g -fno-strict-aliasing -fPIC -fvisibility=hidden -shared -w $INC emu.cpp paged.cpp mod.cpp -o _C$($PY -c "import sysconfig;print(sysconfig.get_config_var('EXT_SUFFIX'))")

// megarl._C: the only file that knows Python. Tensors come as addresses in an int64 array, never as torch objects.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "copy_plan.h"
#include "digest.h"

namespace nb = nanobind;
using nb::literals::operator""_a;
using megarl::CopyPlan;
using megarl::Rect;
using megarl::TiledRect;
using Rects = nb::ndarray<const int64_t, nb::shape<-1, 7>, nb::c_contig, nb::device::cpu>;
using Views = nb::ndarray<const int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
using Digests = nb::ndarray<int64_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<int64_t, nb::shape<-1, 8>, nb::c_contig, nb::device::cpu>;

namespace {

void fill_table(const CopyPlan& plan, Table table) {
  if (static_cast<int64_t>(table.shape(0)) != plan.num_rects()) throw std::invalid_argument("table must have num_rects rows");
  plan.fill_table(reinterpret_cast<TiledRect*>(table.data()));
}

// Digests of views[i] into digests[i]; reads host memory without the interpreter's lock.
void digest(Views views, Digests digests, uint64_t seed, bool sampled, int num_threads) {
  if (digests.shape(0) != views.shape(0)) throw std::invalid_argument("digests must have as many entries as views");
  auto first = reinterpret_cast<const megarl::View*>(views.data());
  auto out = reinterpret_cast<uint64_t*>(digests.data());
  const auto count = static_cast<int64_t>(views.shape(0));
  nb::gil_scoped_release release;
  megarl::check(first, count);
  if (sampled) megarl::digest_sampled(first, count, seed, out);
  else megarl::digest_full(first, count, seed, num_threads, out);
}

#ifdef MEGARL_WITH_CUDA
void run_cuda(const CopyPlan& plan, uintptr_t table, uintptr_t stream) {
  const int error = plan.run_cuda(reinterpret_cast<const TiledRect*>(table), reinterpret_cast<void*>(stream));
  if (error) throw std::runtime_error(std::string("CUDA copy plan: ") + megarl::cuda_error_string(error));
}
#endif

}  // namespace

NB_MODULE(_C, m) {
  nb::class_<CopyPlan>(m, "CopyPlan", "Checked rectangles, copied by each run. Keeps no tensor alive.")
      .def("__init__", [](CopyPlan* self, Rects rects) {
        new (self) CopyPlan(reinterpret_cast<const Rect*>(rects.data()), static_cast<int64_t>(rects.shape(0)));
      }, "rects"_a, "int64 [N, 7]: src, dst, rows, cols, src_ld, dst_ld, mode. Raises ValueError naming the first bad rectangle.")
      .def_prop_ro("num_rects", &CopyPlan::num_rects, "Rectangles that hold at least one element.")
      .def_prop_ro("bytes", &CopyPlan::bytes, "Bytes written by one run.")
      .def("run", &CopyPlan::run, "num_threads"_a = 1, nb::call_guard<nb::gil_scoped_release>(), "Copies host memory; releases the GIL.")
#ifdef MEGARL_WITH_CUDA
      .def("run_cuda", &run_cuda, "table"_a, "stream"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Copies device memory in one launch on `stream`. `table`: address of fill_table's result on that device.")
#endif
      .def("fill_table", &fill_table, "table"_a, "Writes what the CUDA kernel reads into an int64 [num_rects, 8] array.");

  m.def("digest", &digest, "views"_a, "digests"_a, "seed"_a, "sampled"_a, "num_threads"_a = 1,
        "Writes a 64-bit digest per row of views, int64 [N, 5]: address, rows, cols, ld, mode. Raises ValueError naming the first bad one.");

#ifdef MEGARL_WITH_CUDA
  m.attr("built_with_cuda") = true;
#else
  m.attr("built_with_cuda") = false;
#endif
  m.attr("build_info") = MEGARL_BUILD_INFO;
}

// megarl._C: the only file that knows Python. Tensors come as addresses in an int64 array, never as torch objects.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "copy_plan.h"
#include "digest.h"
#include "threads.h"

namespace nb = nanobind;
using nb::literals::operator""_a;
using megarl::CopyPlan;
using megarl::Rect;
using megarl::TiledRect;
using Rects = nb::ndarray<const int64_t, nb::shape<-1, 7>, nb::c_contig, nb::device::cpu>;
using Views = nb::ndarray<const int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
using Digests = nb::ndarray<int64_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<int64_t, nb::shape<-1, 8>, nb::c_contig, nb::device::cpu>;
using Tiles = nb::ndarray<int32_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

namespace {

void fill_tables(const CopyPlan& plan, Table table, Tiles rect_of_tile) {
  if (static_cast<int64_t>(table.shape(0)) != plan.num_rects() || static_cast<int64_t>(rect_of_tile.shape(0)) != plan.num_tiles())
    throw std::invalid_argument("table must have num_rects rows and rect_of_tile num_tiles entries");
  plan.fill_tables(reinterpret_cast<TiledRect*>(table.data()), rect_of_tile.data());
}

// Digests of views[i] into digests[i]; reads host memory without the interpreter's lock.
void digest(Views views, Digests digests, uint64_t seed, bool sampled, int num_threads) {
  if (digests.shape(0) != views.shape(0)) throw std::invalid_argument("digests must have as many entries as views");
  auto first = reinterpret_cast<const megarl::View*>(views.data());
  auto out = reinterpret_cast<uint64_t*>(digests.data());
  const auto count = static_cast<int64_t>(views.shape(0));
  nb::gil_scoped_release release;
  megarl::check(first, count);
  if (sampled) megarl::digest_sampled(first, count, seed, num_threads, out);
  else megarl::digest_full(first, count, seed, num_threads, out);
}

void finish_digests(Views views, Digests sums, uint64_t seed) {
  if (sums.shape(0) != views.shape(0)) throw std::invalid_argument("sums must have as many entries as views");
  megarl::finish_sums(reinterpret_cast<const megarl::View*>(views.data()), static_cast<int64_t>(views.shape(0)), seed,
                      reinterpret_cast<uint64_t*>(sums.data()));
}

void memcpy_with_threads(uintptr_t dst, uintptr_t src, int64_t bytes, int num_threads) {
  if (bytes < 0) throw std::invalid_argument("bytes (" + std::to_string(bytes) + ") must be >= 0");
  megarl::share(bytes, 1 << 18, num_threads, [=](int64_t first, int64_t last) {
    std::memcpy(reinterpret_cast<char*>(dst) + first, reinterpret_cast<const char*>(src) + first, static_cast<size_t>(last - first));
  });
}

#ifdef MEGARL_WITH_CUDA
void check_cuda(int error, const char* what) {
  if (error) throw std::runtime_error(std::string("CUDA ") + what + ": " + megarl::cuda_error_string(error));
}

void run_cuda(const CopyPlan& plan, uintptr_t table, uintptr_t rect_of_tile, uintptr_t stream) {
  check_cuda(plan.run_cuda(reinterpret_cast<const TiledRect*>(table), reinterpret_cast<const int32_t*>(rect_of_tile),
                           reinterpret_cast<void*>(stream)), "copy plan");
}

void sum_cuda(uintptr_t table, uintptr_t view_of_tile, int64_t num_views, int64_t num_tiles, uint64_t seed, bool sampled, uintptr_t sums,
              uintptr_t stream) {
  check_cuda(megarl::sum_cuda(reinterpret_cast<const megarl::TiledView*>(table), reinterpret_cast<const int32_t*>(view_of_tile), num_views,
                              num_tiles, seed, sampled, reinterpret_cast<uint64_t*>(sums), reinterpret_cast<void*>(stream)), "digest");
}
#endif

}  // namespace

NB_MODULE(_C, m) {
  nb::class_<CopyPlan>(m, "CopyPlan", "Checked rectangles, copied by each run. Keeps no tensor alive.")
      .def("__init__", [](CopyPlan* self, Rects rects) {
        new (self) CopyPlan(reinterpret_cast<const Rect*>(rects.data()), static_cast<int64_t>(rects.shape(0)));
      }, "rects"_a, "int64 [N, 7]: src, dst, rows, cols, src_ld, dst_ld, mode. Raises ValueError naming the first bad rectangle.")
      .def_prop_ro("num_rects", &CopyPlan::num_rects, "Rectangles that hold at least one element.")
      .def_prop_ro("num_tiles", &CopyPlan::num_tiles, "Blocks of one launch on a GPU.")
      .def_prop_ro("bytes", &CopyPlan::bytes, "Bytes written by one run.")
      .def("run", &CopyPlan::run, "num_threads"_a = 1, nb::call_guard<nb::gil_scoped_release>(), "Copies host memory; releases the GIL.")
#ifdef MEGARL_WITH_CUDA
      .def("run_cuda", &run_cuda, "table"_a, "rect_of_tile"_a, "stream"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Copies device memory in one launch on `stream`. The tables: addresses of fill_tables' results on that device.")
#endif
      .def("fill_tables", &fill_tables, "table"_a, "rect_of_tile"_a,
           "Writes what the CUDA kernel reads: int64 [num_rects, 8] and int32 [num_tiles].");

  m.def("digest", &digest, "views"_a, "digests"_a, "seed"_a, "sampled"_a, "num_threads"_a = 1,
        "Writes a 64-bit digest per row of views, int64 [N, 5]: address, rows, cols, ld, mode. Raises ValueError naming the first bad one.");
  m.def("memcpy", &memcpy_with_threads, "dst"_a, "src"_a, "bytes"_a, "num_threads"_a = 1, nb::call_guard<nb::gil_scoped_release>(),
        "The C library's copy of host memory, cut as CopyPlan.run cuts: what a plan is measured against.");
  m.def("finish_digests", &finish_digests, "views"_a, "sums"_a, "seed"_a, "Turns sum_cuda's sums into digests, in place.");
#ifdef MEGARL_WITH_CUDA
  m.def("sum_cuda", &sum_cuda, "table"_a, "view_of_tile"_a, "num_views"_a, "num_tiles"_a, "seed"_a, "sampled"_a, "sums"_a, "stream"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "Adds what `digest` sums up to `sums` on the device, in one launch. Addresses on the device: table, int64 [num_views, 6], is a\n"
        "view and the number of tiles of 4096 words before it; view_of_tile is int32 [num_tiles]; sums is int64 [num_views].");
#endif

#ifdef MEGARL_WITH_CUDA
  m.attr("built_with_cuda") = true;
#else
  m.attr("built_with_cuda") = false;
#endif
  m.attr("build_info") = MEGARL_BUILD_INFO;
}

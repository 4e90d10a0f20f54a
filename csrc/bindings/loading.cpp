// Exposes the reader of checkpoints' files to ep_server/backends/gpu/staged_files.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/pointer.hpp"
#include "loading/staged_reader.hpp"

namespace py = pybind11;

using namespace ep::loading;
using ep::pointer;

namespace {

// pieces: file, begin, size and address of each. Returns: the piece that cannot be read, and why; or nothing.
std::optional<std::pair<size_t, std::string>> read_pieces(
    StagedReader& reader, uintptr_t stream,
    const std::vector<std::tuple<int, uint64_t, uint64_t, uintptr_t>>& given) {
  const py::gil_scoped_release release;
  std::vector<Piece> pieces;
  for (const auto& [file, begin, size, into] : given)
    pieces.push_back({file, begin, size, pointer<std::byte>(into)});
  try {
    reader.read(pieces, pointer<CUstream_st>(stream));
  } catch (const FileError& error) {
    return std::pair(error.piece, error.reason);
  }
  return std::nullopt;
}

}  // namespace

void bind_loading(py::module_& m) {
  py::class_<StagedReader>(m, "StagedReader", py::module_local())  // tests load two modules with it
      .def(py::init(
               [](int device, const std::vector<uintptr_t>& buffers, size_t buffer_bytes, double seconds) {
                 std::vector<std::byte*> addresses;
                 for (const uintptr_t buffer : buffers) addresses.push_back(pointer<std::byte>(buffer));
                 return std::make_unique<StagedReader>(device, addresses, buffer_bytes, seconds);
               }),
           py::kw_only(), py::arg("device"), py::arg("buffers"), py::arg("buffer_bytes"), py::arg("seconds"))
      .def("read", read_pieces, py::kw_only(), py::arg("stream"), py::arg("pieces"));
}

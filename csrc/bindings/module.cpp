// The module ep_server._C: the exchange, the fabric transport and the CPU kernels. Turns what C++ throws into
// the exceptions of ep_server/errors.py.
#include <pybind11/pybind11.h>

#include <string>
#include <system_error>

#include "bindings/exchange.hpp"
#include "exchange/common/status.hpp"

void bind_layout(py::module_& m);       // layout.cpp: sizes, offsets, segments, row arithmetic
void bind_exchange(py::module_& m);     // exchange.cpp: the four halves on one host
void bind_fabric(py::module_& m);       // fabric.cpp: the transport between hosts
void bind_cpu_kernels(py::module_& m);  // cpu_kernels.cpp: the model's kernels

namespace {

using namespace ep;

std::string describe(const Status& s) {
  return std::string(name(s.op)) + "/" + name(s.phase) + ", rank " + std::to_string(s.rank) + ", peer " +
         std::to_string(s.peer) + ", expected epoch " + std::to_string(s.expected) + ", saw " +
         std::to_string(s.seen);
}

void raise(const char* type, const std::string& message) {
  py::object error = py::module_::import("ep_server.errors").attr(type);
  PyErr_SetString(error.ptr(), message.c_str());
}

void raise_status(const Status& s) {
  switch (s.code) {
    case Code::kTimeout: {
      py::object error = py::module_::import("ep_server.errors").attr("PeerTimeout");
      PyErr_SetObject(error.ptr(),
                      py::make_tuple(name(s.op), name(s.phase), s.rank, s.peer, s.expected, s.seen).ptr());
      return;
    }
    case Code::kHook:
      return raise("HookNotCalled", "rank " + std::to_string(s.rank) + ": " + name(s.op) + " of epoch " +
                                        std::to_string(s.expected) + " takes the bank of epoch " +
                                        std::to_string(s.seen) + ", which was not received or released here");
    case Code::kViolation:
      return raise("ProtocolViolation", "a cell is newer than expected or invalid: " + describe(s));
    case Code::kAborted:
      return raise("GroupAborted", s.seen == uint32_t(Code::kRequested) && s.expected == 0
                                       ? "rank " + std::to_string(s.rank) + " aborted the group"
                                       : "the group was aborted after an error in " + describe(s));
    case Code::kLost: {
      py::object error = py::module_::import("ep_server.errors").attr("PeerLost");
      PyErr_SetObject(error.ptr(), py::make_tuple(name(s.op), name(s.phase), s.rank, s.peer).ptr());
      return;
    }
    case Code::kInterrupted:
      return;  // the signal handler's own exception is set
    default:
      return raise("InternalError", "unexpected status: " + describe(s));
  }
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const ExchangeFailure& failure) {
    raise_status(failure.status);
  } catch (const BadArgument& bad) {
    py::object error = py::module_::import("ep_server.errors").attr("InvalidArgument");
    PyErr_SetObject(error.ptr(), py::make_tuple(bad.field, bad.value, bad.allowed).ptr());
  } catch (const std::system_error& os) {
    PyErr_SetObject(PyExc_OSError, py::make_tuple(os.code().value(), os.what()).ptr());
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native exchange and CPU kernels. Addresses are Tensor.data_ptr(); 0 means absent.";
  py::register_exception_translator(&translate);
  bind_layout(m);
  bind_exchange(m);
  bind_fabric(m);
  bind_cpu_kernels(m);
}

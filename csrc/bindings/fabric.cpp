// Exposes the transport between hosts. Built without libfabric's headers, this has only FABRIC = False, and
// ep_server/exchange/fabric reports what is missing.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

namespace py = pybind11;

#ifndef EP_SERVER_FABRIC

void bind_fabric(py::module_& m) { m.attr("FABRIC") = false; }

#else

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/exchange.hpp"
#include "exchange/fabric/carrier.hpp"
#include "exchange/fabric/lane.hpp"
#include "exchange/fabric/probe.hpp"

namespace {

using namespace ep;
// Name of the endpoint; then base, key and size of a rank's host memory and of its device memory.
using AddressTuple = std::tuple<py::bytes, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t>;
// Addresses and sizes of inbound and outbound memory; kind and number of the device.
using DeviceTuple = std::tuple<uintptr_t, uint64_t, uintptr_t, uint64_t, uint32_t, int32_t>;
using Addresses = std::vector<AddressTuple>;

// One rank's endpoint and the exchange that it carries.
class FabricPort {
 public:
  FabricPort(const Geometry& geometry, uint32_t rank, const std::vector<int32_t>& placement,
             const Timing& timing, const fabric::Options& options, const fabric::Share& share,
             const fabric::DeviceMemory& device)
      : exchange_(std::make_shared<Exchange>(geometry, rank, placement, timing)),
        carrier_(std::make_shared<fabric::FabricCarrier>(exchange_->group(), options, share, device)) {
    exchange_->attach(carrier_->memory(), carrier_);
  }

  const std::shared_ptr<Exchange>& exchange() const { return exchange_; }
  fabric::FabricCarrier& carrier() { return *carrier_; }

 private:
  std::shared_ptr<Exchange> exchange_;
  std::shared_ptr<fabric::FabricCarrier> carrier_;
};

AddressTuple address_tuple(const fabric::EndpointAddress& address) {
  const auto& [name, host, device] = address;
  return {py::bytes(name), host.base, host.key, host.bytes, device.base, device.key, device.bytes};
}

fabric::EndpointAddress address_from(const AddressTuple& peer) {
  const auto& [name, base, key, bytes, device_base, device_key, device_bytes] = peer;
  return {std::string(name), {base, key, bytes}, {device_base, device_key, device_bytes}};
}

fabric::DeviceMemory device_from(const std::optional<DeviceTuple>& device) {
  if (!device) return {};
  const auto& [inbound, inbound_bytes, outbound, outbound_bytes, kind, number] = *device;
  return {{reinterpret_cast<std::byte*>(inbound), inbound_bytes},
          {reinterpret_cast<std::byte*>(outbound), outbound_bytes},
          kind,
          number};
}

void connect(FabricPort& port, const Addresses& addresses, uint32_t session, uint64_t timeout_ns) {
  std::vector<fabric::EndpointAddress> all;
  for (const auto& peer : addresses) all.push_back(address_from(peer));
  py::gil_scoped_release release;
  port.carrier().connect(all, session, timeout_ns);
}

void bind_probe(py::module_& m) {
  py::class_<fabric::Probe>(m, "FabricProbe",
                            "One of two bare endpoints, for the benchmark: connect to the other's address, "
                            "then both call the same.")
      .def(py::init<const fabric::Options&, uint64_t>(), py::arg("options"), py::arg("bytes"))
      .def_property_readonly("description", [](fabric::Probe& self) { return self.endpoint().description(); })
      .def_property_readonly("address",
                             [](fabric::Probe& self) { return address_tuple(self.endpoint().address()); })
      .def(
          "connect",
          [](fabric::Probe& self, const AddressTuple& peer) { self.endpoint().add_peer(address_from(peer)); },
          py::arg("peer"))
      .def("latency", &fabric::Probe::latency, py::arg("bytes"), py::arg("rounds"), py::arg("first"),
           py::arg("timeout_ns"), py::call_guard<py::gil_scoped_release>())
      .def("stream", &fabric::Probe::stream, py::arg("bytes"), py::arg("writes"), py::arg("window"),
           py::arg("first"), py::arg("timeout_ns"), py::call_guard<py::gil_scoped_release>());
}

void bind_lane(py::module_& m) {
  py::class_<fabric::Lane>(m, "FabricLane", py::buffer_protocol(),
                           "One end of memory that one process writes into another one's. Its buffer is that "
                           "memory.")
      .def(py::init<const fabric::Options&, uint64_t>(), py::arg("options"), py::arg("bytes"),
           py::call_guard<py::gil_scoped_release>())
      .def_buffer([](fabric::Lane& self) {
        const auto [begin, bytes] = self.memory();
        return py::buffer_info(reinterpret_cast<uint8_t*>(begin), py::ssize_t(bytes));
      })
      .def_property_readonly("description", [](fabric::Lane& self) { return self.endpoint().description(); })
      .def_property_readonly("address",
                             [](fabric::Lane& self) { return address_tuple(self.endpoint().address()); })
      .def(
          "connect",
          [](fabric::Lane& self, const AddressTuple& peer) { self.endpoint().add_peer(address_from(peer)); },
          py::arg("peer"))
      .def("write", &fabric::Lane::write, py::arg("at"), py::arg("bytes"), py::arg("number"),
           py::arg("timeout_ns"), py::call_guard<py::gil_scoped_release>(),
           "Copies some bytes to the same place at the peer. Raises: StartupError, IndexError.")
      .def("wait", &fabric::Lane::await, py::arg("number"), py::arg("timeout_ns"),
           py::call_guard<py::gil_scoped_release>(),
           "Waits for a write of the peer; whether it is here. Raises: StartupError.");
}

using ProviderTuple = std::tuple<std::string, std::string, std::string, std::string>;

// Provider, fabric, domain, and why the candidate cannot be used.
std::vector<ProviderTuple> providers(const fabric::Options& options) {
  std::vector<ProviderTuple> all;
  for (const fabric::Candidate& c : fabric::list(fabric::Library(options), options))
    all.emplace_back(c.provider, c.fabric, c.domain, c.missing);
  return all;
}

// One line that names the provider an endpoint with these settings would use.
std::string chosen(const fabric::Options& options) {
  const fabric::Library library(options);
  return fabric::describe(library, *fabric::choose(library, options));
}

}  // namespace

void bind_fabric(py::module_& m) {
  m.attr("FABRIC") = true;
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const fabric::FabricError& error) {
      py::object type = py::module_::import("ep_server.errors").attr("StartupError");
      PyErr_SetString(type.ptr(), error.what());
    }
  });

  py::class_<fabric::Options>(m, "FabricOptions")
      .def(py::init([](std::string library, std::string provider, std::string domain, std::string address,
                       std::string interface, int64_t traffic_class, int32_t gid_index, uint32_t queue_depth,
                       bool adaptive_routing, uint64_t disorder, uint64_t delay_ns, bool strict_memory,
                       bool device_memory, bool device_copies) {
             return fabric::Options{library,       provider,      domain,        address,          interface,
                                    traffic_class, gid_index,     queue_depth,   adaptive_routing, disorder,
                                    delay_ns,      strict_memory, device_memory, device_copies};
           }),
           py::kw_only(), py::arg("library"), py::arg("provider"), py::arg("domain"), py::arg("address"),
           py::arg("interface"), py::arg("traffic_class"), py::arg("gid_index"), py::arg("queue_depth"),
           py::arg("adaptive_routing"), py::arg("disorder"), py::arg("delay_ns"), py::arg("strict_memory"),
           py::arg("device_memory"), py::arg("device_copies"));
  m.def("fabric_providers", &providers, py::arg("options"),
        "(provider, fabric, domain, what is missing) of every provider found.");
  m.def("fabric_chosen", &chosen, py::arg("options"), "The provider that would be opened, in one line.");
  m.def(
      "host_segment_bytes",
      [](const Geometry& g, uint32_t ranks) { return fabric::host_regions(g, ranks).bytes(); },
      py::arg("geometry"), py::arg("ranks"));
  m.def(
      "create_host_segment",
      [](const Geometry& g, uint32_t ranks) { return shm::create(g, fabric::host_regions(g, ranks)); },
      py::arg("geometry"), py::arg("ranks"), py::call_guard<py::gil_scoped_release>());

  py::class_<FabricPort, std::shared_ptr<FabricPort> >(m, "FabricPort",
                                                       "One rank's endpoint and the exchange over it.")
      .def(py::init([](const Geometry& geometry, uint32_t rank, const std::vector<int32_t>& placement,
                       uint64_t timeout_ns, uint64_t liveness_ns, uint64_t spin_ns, bool mask_on_timeout,
                       const fabric::Options& options, const std::vector<uint32_t>& hosts, int segment,
                       const std::vector<int>& bells, const std::optional<DeviceTuple>& device) {
             const auto share = segment < 0 ? fabric::Share::alone(geometry.num_ranks)
                                            : fabric::Share{hosts, segment, bells};
             if (share.hosts.size() != geometry.num_ranks)
               throw std::invalid_argument(std::to_string(share.hosts.size()) + " hosts for " +
                                           std::to_string(geometry.num_ranks) + " ranks");
             return std::make_shared<FabricPort>(geometry, rank, placement,
                                                 Timing{timeout_ns, liveness_ns, spin_ns, mask_on_timeout},
                                                 options, share, device_from(device));
           }),
           py::kw_only(), py::arg("geometry"), py::arg("rank"), py::arg("placement"), py::arg("timeout_ns"),
           py::arg("liveness_ns"), py::arg("spin_ns"), py::arg("mask_on_timeout"), py::arg("options"),
           py::arg("hosts"), py::arg("segment"), py::arg("bells"), py::arg("device") = py::none())
      .def_property_readonly("description", [](FabricPort& self) { return self.carrier().description(); })
      .def_property_readonly("address",
                             [](FabricPort& self) { return address_tuple(self.carrier().address()); })
      .def("connect", &connect, py::arg("addresses"), py::arg("session"), py::arg("timeout_ns"))
      .def(
          "close",
          [](FabricPort& self, uint64_t linger_ns) {
            py::gil_scoped_release release;
            self.carrier().close(linger_ns);
          },
          py::arg("linger_ns"))
      .def_property_readonly("writes", [](FabricPort& self) { return self.carrier().writes(); })
      .def_property_readonly("exchange", [](FabricPort& self) { return self.exchange(); });
  bind_probe(m);
  bind_lane(m);
}

#endif

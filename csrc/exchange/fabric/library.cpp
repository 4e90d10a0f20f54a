// Finds libfabric.so and its entry points.
#include "exchange/fabric/library.hpp"

#include <dlfcn.h>
#include <rdma/fi_errno.h>
#include <signal.h>

#include <array>

static_assert(FI_MAJOR_VERSION == 1, "built with headers of libfabric 1.x: their records are ABI 1.3");

namespace ep::fabric {
namespace {

// The version of each function that takes the structs of the 1.x headers; libfabric 2.x still has it.
template <class Fn>
Fn find(void* handle, const std::string& path, const char* name, const char* version) {
  void* found = dlvsym(handle, name, version);
  if (found == nullptr)
    throw FabricError(path + " has no " + name + "@" + version + ": libfabric 1.14 to 2.x is needed");
  return reinterpret_cast<Fn>(found);
}

// Restores the process's signal handlers after loading. Debian's libfabric includes PSM, which installs its
// own handlers when it is loaded, also for SIGINT and SIGTERM. They end the process and leave a file behind.
class Handlers {
 public:
  Handlers() {
    for (int number = 1; number < kSignals; ++number) sigaction(number, nullptr, &before_[number]);
  }
  ~Handlers() {
    for (int number = 1; number < kSignals; ++number) {
      struct sigaction now{};
      if (sigaction(number, nullptr, &now) == 0 && now.sa_sigaction != before_[number].sa_sigaction)
        sigaction(number, &before_[number], nullptr);
    }
  }
  Handlers(const Handlers&) = delete;
  Handlers& operator=(const Handlers&) = delete;

 private:
  static constexpr int kSignals = 32;  // all but the real-time signals
  std::array<struct sigaction, kSignals> before_{};
};

void* load(const std::string& path) {
  const Handlers kept;
  return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

}  // namespace

Library::Library(const Options& options)
    : path_(options.library.empty() ? "libfabric.so.1" : options.library) {
  export_parameters(options);
  handle_ = load(path_);
  if (handle_ == nullptr) {
    const char* why = dlerror();
    throw FabricError(std::string("libfabric cannot be loaded: ") + (why != nullptr ? why : path_.c_str()));
  }
  getinfo_ = find<decltype(getinfo_)>(handle_, path_, "fi_getinfo", "FABRIC_1.3");
  freeinfo_ = find<decltype(freeinfo_)>(handle_, path_, "fi_freeinfo", "FABRIC_1.3");
  dupinfo_ = find<decltype(dupinfo_)>(handle_, path_, "fi_dupinfo", "FABRIC_1.3");
  fabric_ = find<decltype(fabric_)>(handle_, path_, "fi_fabric", "FABRIC_1.1");
  version_ = find<decltype(version_)>(handle_, path_, "fi_version", "FABRIC_1.0");
  strerror_ = find<decltype(strerror_)>(handle_, path_, "fi_strerror", "FABRIC_1.0");
  Dl_info where{};
  if (dladdr(reinterpret_cast<void*>(getinfo_), &where) != 0 && where.dli_fname != nullptr)
    path_ = where.dli_fname;
}

std::string Library::version_text() const {
  return std::to_string(FI_MAJOR(version())) + "." + std::to_string(FI_MINOR(version()));
}

Info Library::candidates(uint32_t api, const char* node, const fi_info* hints) const {
  fi_info* list = nullptr;
  const uint64_t flags = node != nullptr ? FI_SOURCE : 0;  // node is this end's own address
  const int result = getinfo_(api, node, nullptr, flags, hints, &list);
  if (result == -FI_ENODATA) return {nullptr, {freeinfo_}};
  check(result, "fi_getinfo");
  return {list, {freeinfo_}};
}

void Library::check(int64_t result, const std::string& what) const {
  if (result != 0) throw FabricError(what + ": " + reason(result) + " (" + std::to_string(result) + ")");
}

}  // namespace ep::fabric

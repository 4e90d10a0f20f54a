// Loads libfabric at run time. It is not linked, so a server on one host does not need it. Only functions
// outside libfabric's tables are looked up. All others are called through the objects that libfabric returns.
#pragma once

#include <rdma/fabric.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "exchange/fabric/provider_settings.hpp"

namespace ep::fabric {

// libfabric or its provider failed, or something is missing. Becomes StartupError, or an error of an
// operation.
struct FabricError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct InfoDeleter {
  void (*free_info)(fi_info*);
  void operator()(fi_info* info) const { free_info(info); }
};
using Info = std::unique_ptr<fi_info, InfoDeleter>;

class Library {
 public:
  // Loads options.library. Providers read the traffic settings from the environment. Throws FabricError.
  explicit Library(const Options& options);

  uint32_t version() const { return version_(); }
  std::string version_text() const;
  const std::string& path() const { return path_; }  // the path that was loaded
  const char* reason(int64_t error) const { return strerror_(int(error < 0 ? -error : error)); }

  Info empty_hints() const { return {dupinfo_(nullptr), {freeinfo_}}; }
  Info copy(const fi_info* info) const { return {dupinfo_(info), {freeinfo_}}; }
  // A list of candidates, or null if none matches. Throws FabricError for any other failure.
  Info candidates(uint32_t api, const char* node, const fi_info* hints) const;
  int fabric(fi_fabric_attr* attr, fid_fabric** made) const { return fabric_(attr, made, nullptr); }

  // Throws FabricError("what: reason") unless result is 0.
  void check(int64_t result, const std::string& what) const;

 private:
  void* handle_;  // never closed: providers leave threads and exit handlers behind
  std::string path_;
  decltype(&fi_getinfo) getinfo_;
  decltype(&fi_freeinfo) freeinfo_;
  decltype(&fi_dupinfo) dupinfo_;
  decltype(&fi_fabric) fabric_;
  decltype(&fi_version) version_;
  decltype(&fi_strerror) strerror_;
};

}  // namespace ep::fabric

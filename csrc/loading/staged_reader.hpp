// Reads files into memory of a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace ep::loading {

// Bytes of an open file, and where they belong in memory of the GPU.
struct Piece {
  int file;
  uint64_t begin, size;
  std::byte* into;
};

// A piece cannot be read: its number among those of a call.
struct FileError {
  size_t piece;
  std::string reason;
};

// Reads through buffers of pinned memory: while one is copied from, the next is read into. For one thread.
class StagedReader {
 public:
  // buffers: of buffer_bytes each; the caller keeps them while this lives. seconds: that a copy may take.
  StagedReader(int device, const std::vector<std::byte*>& buffers, size_t buffer_bytes, double seconds);

  // Returns when all pieces are read; their copies are enqueued in `stream`. The thread's current device is
  // this one then. Throws: FileError; std::runtime_error if the device fails or copies are late.
  void read(std::span<const Piece> pieces, cudaStream_t stream);

 private:
  struct DestroyEvent {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }  // does not wait for copies
  };
  using Event = std::unique_ptr<CUevent_st, DestroyEvent>;

  struct Buffer {
    std::byte* bytes;
    Event copied;
    bool busy;
  };

  std::string read_piece(const Piece& piece, cudaStream_t stream);
  Buffer& next_buffer();

  int device_;
  size_t buffer_bytes_, turn_ = 0;
  double seconds_;
  std::vector<Buffer> buffers_;
};

}  // namespace ep::loading

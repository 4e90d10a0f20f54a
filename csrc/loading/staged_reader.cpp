#include "loading/staged_reader.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace ep::loading {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kLook(50);  // between two checks; other threads' copies are in flight

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

std::string late(double seconds) {
  char text[64];
  std::snprintf(text, sizeof text, "copies to the device do not end in %g s", seconds);
  return text;
}

// Returns: why it cannot be read; "" if it was.
std::string read_whole(int file, std::byte* to, size_t size, uint64_t begin) {
  while (size != 0) {
    const ssize_t count = pread(file, to, size, off_t(begin));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return std::generic_category().message(errno);
    if (count == 0) return "the file ends at byte " + std::to_string(begin);
    to += count, begin += uint64_t(count), size -= size_t(count);
  }
  return "";
}

}  // namespace

StagedReader::StagedReader(int device, const std::vector<std::byte*>& buffers, size_t buffer_bytes,
                           double seconds)
    : device_(device), buffer_bytes_(buffer_bytes), seconds_(seconds) {
  check(cudaSetDevice(device), "cudaSetDevice");
  for (std::byte* bytes : buffers) {
    cudaEvent_t event;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    buffers_.push_back({bytes, Event(event), false});
  }
}

void StagedReader::read(std::span<const Piece> pieces, cudaStream_t stream) {
  check(cudaSetDevice(device_), "cudaSetDevice");
  for (size_t i = 0; i < pieces.size(); ++i) {
    std::string wrong = read_piece(pieces[i], stream);
    if (!wrong.empty()) throw FileError{i, std::move(wrong)};
  }
}

// Returns: as read_whole().
std::string StagedReader::read_piece(const Piece& piece, cudaStream_t stream) {
  for (uint64_t at = 0; at < piece.size; at += buffer_bytes_) {
    const size_t count = size_t(std::min<uint64_t>(buffer_bytes_, piece.size - at));
    Buffer& buffer = next_buffer();
    std::string wrong = read_whole(piece.file, buffer.bytes, count, piece.begin + at);
    if (!wrong.empty()) return wrong;
    check(cudaMemcpyAsync(piece.into + at, buffer.bytes, count, cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    check(cudaEventRecord(buffer.copied.get(), stream), "cudaEventRecord");
    buffer.busy = true;
  }
  return "";
}

// Nothing is copied from it any more.
StagedReader::Buffer& StagedReader::next_buffer() {
  Buffer& buffer = buffers_[turn_++ % buffers_.size()];
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds_);
  while (buffer.busy) {
    const cudaError_t passed = cudaEventQuery(buffer.copied.get());
    if (passed == cudaErrorNotReady) {
      if (Clock::now() > deadline) throw std::runtime_error(late(seconds_));
      std::this_thread::sleep_for(kLook);
      continue;
    }
    check(passed, "cudaEventQuery");
    buffer.busy = false;
  }
  return buffer;
}

}  // namespace ep::loading

#include "autocache/record_file.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>

#include "autocache/tensor_rows.h"

namespace pipetransformer::autocache {

namespace {

constexpr std::size_t kChunk = std::size_t{4} << 20;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// Reads a file from front to back in large pieces.
class Pieces {
 public:
  Pieces(int descriptor, uint64_t begin, uint64_t end)
      : descriptor_(descriptor), next_(begin), end_(end) {}

  // The next bytes, valid until the next call; null: the file has fewer.
  std::byte* take(uint64_t bytes) {
    if (bytes > filled_ - first_ && !fill(bytes)) {
      return nullptr;
    }
    std::byte* found = buffer_.data() + first_;
    first_ += bytes;
    return found;
  }

  bool done() const noexcept {
    return first_ == filled_ && next_ >= end_;
  }

 private:
  bool fill(uint64_t bytes) {
    const std::size_t kept = filled_ - first_;
    if (next_ > end_ || bytes - kept > end_ - next_) {
      return false;
    }
    if (kept > 0) {
      std::memmove(buffer_.data(), buffer_.data() + first_, kept);
    }
    first_ = 0;
    filled_ = kept;
    buffer_.resize(std::max<std::size_t>(bytes, kChunk));
    while (filled_ < bytes) {
      const std::size_t most =
          std::min<uint64_t>(buffer_.size() - filled_, end_ - next_);
      const ssize_t found = ::pread(
          descriptor_,
          buffer_.data() + filled_,
          most,
          static_cast<off_t>(next_));
      if (found < 0 && errno != EINTR) {
        fail("read");
      }
      if (found == 0) {
        return false;  // shorter than it was
      }
      filled_ += std::max<ssize_t>(found, 0);
      next_ += std::max<ssize_t>(found, 0);
    }
    return true;
  }

  int descriptor_;
  uint64_t next_;
  uint64_t end_;
  std::size_t first_ = 0;
  std::size_t filled_ = 0;
  std::vector<std::byte> buffer_;
};

}  // namespace

RecordWriter::RecordWriter(int descriptor, uint64_t begin)
    : descriptor_(descriptor), end_(begin) {}

std::byte* RecordWriter::payload(uint64_t bytes) {
  const std::size_t wanted = used_ + sizeof(RecordHeader) + bytes;
  if (buffer_.size() < wanted) {
    buffer_.resize(wanted);
  }
  return buffer_.data() + used_ + sizeof(RecordHeader);
}

void RecordWriter::add(const RecordHeader& header) {
  std::memcpy(buffer_.data() + used_, &header, sizeof(header));
  used_ += sizeof(header) + header.payload_bytes;
  if (used_ >= kChunk) {
    flush();
  }
}

uint64_t RecordWriter::finish() {
  flush();
  return end_;
}

void RecordWriter::flush() {
  std::size_t written = 0;
  while (written < used_) {
    const ssize_t count = ::pwrite(
        descriptor_,
        buffer_.data() + written,
        used_ - written,
        static_cast<off_t>(end_));
    if (count < 0 && errno != EINTR) {
      fail("write");
    }
    written += std::max<ssize_t>(count, 0);
    end_ += std::max<ssize_t>(count, 0);
  }
  used_ = 0;
}

uint64_t read_records(
    int descriptor,
    uint64_t begin,
    uint64_t end,
    const std::function<void(const RecordHeader&, std::span<const Segment>)>&
        take) {
  Pieces pieces(descriptor, begin, end);
  uint64_t damaged = 0;
  std::array<Segment, kMaxTensors> segments;
  while (!pieces.done()) {
    RecordHeader header;
    const std::byte* bytes = pieces.take(sizeof(header));
    if (bytes == nullptr) {
      return damaged + 1;
    }
    std::memcpy(&header, bytes, sizeof(header));
    if (header.checksum != header_checksum(header) ||
        !within_format(header.layout) ||
        payload_bytes(header.layout) != header.payload_bytes) {
      return damaged + 1;
    }
    std::byte* payload = pieces.take(header.payload_bytes);
    if (payload == nullptr) {
      return damaged + 1;
    }
    const auto parts = segments_of(header.layout, payload, segments);
    if (payload_checksum(parts) != header.payload_checksum) {
      ++damaged;
      continue;
    }
    take(header, parts);
  }
  return damaged;
}

}  // namespace pipetransformer::autocache

// Records in a file: how they outlive the memory they were in.
//
//   for each record: RecordHeader | its payload, each tensor in whole words
//
// A file may hold anything: headers and payloads are checked before a record is
// used. What fails its checksum is counted and passed over; behind a header
// that does, no record can be told, and reading ends. Functions throw
// std::system_error with what the disk reported, and work on descriptors of
// regular files, whose positions they leave alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "autocache/record.h"

namespace pipetransformer::autocache {

class RecordWriter {
 public:
  // Appends behind the first `begin` bytes of the file.
  RecordWriter(int descriptor, uint64_t begin);

  // Room for the next record's payload, of which add() takes what its header
  // says; valid until then.
  std::byte* payload(uint64_t bytes);
  void add(const RecordHeader& header);

  // Writes what is left, and returns the file's size.
  uint64_t finish();

 private:
  void flush();

  int descriptor_;
  uint64_t end_;  // of what is written
  std::size_t used_ = 0;
  std::vector<std::byte> buffer_;
};

// Returns how many records were damaged. `take` is given each whole one with
// the bytes of its tensors, which it may not keep.
uint64_t read_records(
    int descriptor,
    uint64_t begin,
    uint64_t end,
    const std::function<void(const RecordHeader&, std::span<const Segment>)>&
        take);

}  // namespace pipetransformer::autocache

// What a protocol between ranks needs of a store: keys that are read, written,
// compared and removed, one at a time. Torch-free.
//
// Every operation is atomic and bounded; none waits for a key. An
// implementation whose store is gone throws (see StoreBoard).
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace pipetransformer::autodp {

class Board {
 public:
  Board() = default;
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;
  virtual ~Board() = default;

  // The value, nullopt when the key is not there.
  virtual std::optional<std::string> read(const std::string& key) = 0;
  // Whether all `keys` are there.
  virtual bool exist(const std::vector<std::string>& keys) = 0;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Writes `desired` if the key holds `expected` (empty: is not there). Returns
  // what the key holds afterwards; `expected` where there is no key and it is
  // not empty.
  virtual std::string compare_set(
      const std::string& key,
      const std::string& expected,
      const std::string& desired) = 0;
  // Absent keys are ignored.
  virtual void remove(const std::vector<std::string>& keys) = 0;
};

}  // namespace pipetransformer::autodp

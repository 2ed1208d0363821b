// The model's board: a map that checks what is done to it, and may be mutated.
#pragma once

#include "autodp/store/board.h"
#include "protocol_world.h"

namespace model {

// The board as rank `rank` uses it.
class ModelBoard : public pipetransformer::autodp::Board {
 public:
  ModelBoard(World& world, int rank) : world_(world), rank_(rank) {}

  std::optional<std::string> read(const std::string& key) override;
  bool exist(const std::vector<std::string>& keys) override;
  void set(const std::string& key, const std::string& value) override;
  std::string compare_set(
      const std::string& key,
      const std::string& expected,
      const std::string& desired) override;
  void remove(const std::vector<std::string>& keys) override;

 private:
  bool is(Mutation mutation) const {
    return world_.mutation_ == mutation;
  }
  int64_t head() const;
  void write(const std::string& key, const std::string& value);
  void check_decision(int64_t epoch, const std::string& value);
  void check_head(const std::string& value);

  World& world_;
  int rank_;
};

}  // namespace model

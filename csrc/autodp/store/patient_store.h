// A store for building groups: same keys, but nothing ever blocks in it.
//
// A backend that connects waits in the store for the addresses of its peers; a
// TCPStore client serialises its operations, so one that waits for a dead peer
// would block whoever uses that connection next, until its timeout. Here every
// wait is a row of short looks through the plane's own connection, and ends
// with PeerFailureError once the generation it was made for has failed.
//
// Thread-safe.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "autodp/failure/failure.h"
#include "autodp/store/store_client.h"

namespace pipetransformer::autodp {

class PatientStore : public c10d::Store {
 public:
  // `timeout` bounds get(), and wait() without a timeout of its own.
  PatientStore(
      std::shared_ptr<StoreClient> client,
      std::shared_ptr<FailureLatch> latch,
      std::chrono::milliseconds timeout);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  using c10d::Store::compareSet;
  std::vector<uint8_t> compareSet(
      const std::string& key,
      const std::vector<uint8_t>& expected,
      const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(
      const std::vector<std::string>& keys,
      const std::chrono::milliseconds& timeout) override;

 private:
  template <typename Operation>
  auto run(Operation operation);

  std::shared_ptr<StoreClient> client_;
  std::shared_ptr<FailureLatch> latch_;
};

// Waits until `store` has all `keys`, in short looks; throws DistStoreError
// after `timeout`, of zero (c10d's kNoTimeout) never.
void wait_by_looking(
    c10d::Store& store,
    const std::vector<std::string>& keys,
    std::chrono::milliseconds timeout);

}  // namespace pipetransformer::autodp

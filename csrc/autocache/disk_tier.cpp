#include "autocache/disk_tier.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autocache/aligned_buffers.h"
#include "autocache/process.h"

namespace pipetransformer::autocache {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr int kThreads = 8;
constexpr int kMostFailedReads = 8;
constexpr uint64_t kSlowBytesPerMs = 100'000;
constexpr uint64_t kWriteBytes = uint64_t{64} << 20;  // under way at once
constexpr uint64_t kIdleBytes = uint64_t{64} << 20;   // of buffers
constexpr uint64_t kKeptTurns = 8;                    // calls of prefetch()
constexpr milliseconds kStopPatience{1000};

// 0: all tensors are native.
uint64_t encodings_of(const RecordLayout& layout) {
  static_assert(kMaxTensors <= sizeof(uint64_t));
  uint64_t word = 0;
  for (const TensorLayout& tensor : layout.tensors) {
    word = word << 8 | static_cast<uint8_t>(tensor.codec);
  }
  return word;
}

}  // namespace

// What belongs to the process that made it: a child of a fork must not touch
// any of it.
struct DiskTier::Traffic {
  // Of a record that nobody has asked for yet.
  struct Ahead {
    SlotVersion version;
    std::shared_ptr<DiskJob> job;
    uint64_t turn;
  };

  std::shared_ptr<AlignedBuffers> buffers =
      std::make_shared<AlignedBuffers>(kIdleBytes);
  std::shared_ptr<DiskMeter> reads = std::make_shared<DiskMeter>();
  std::shared_ptr<DiskMeter> writes = std::make_shared<DiskMeter>();
  std::mutex mutex;  // guards what follows
  std::unique_ptr<DiskIo> io;
  std::unordered_map<uint64_t, Ahead> ahead;  // by sample
  uint64_t ahead_bytes = 0;
  uint64_t turn = 0;

  // The read ahead of a sample, which is taken out; null: none.
  std::shared_ptr<DiskJob> take(uint64_t sample, SlotVersion version) {
    const auto found = ahead.find(sample);
    if (found == ahead.end()) {
      return nullptr;
    }
    const bool same = found->second.version.word() == version.word();
    std::shared_ptr<DiskJob> job = drop(found);
    return same ? std::move(job) : nullptr;
  }

  std::shared_ptr<DiskJob>
  drop(std::unordered_map<uint64_t, Ahead>::iterator which) {
    std::shared_ptr<DiskJob> job = std::move(which->second.job);
    ahead_bytes -= job->bytes;
    ahead.erase(which);
    return job;
  }

  void drop_old() {
    for (auto each = ahead.begin(); each != ahead.end();) {
      const auto next = std::next(each);
      if (each->second.turn + kKeptTurns <= turn) {
        drop(each)->give_up();
      }
      each = next;
    }
  }
};

DiskTier::DiskTier(DiskIndex index, const DiskOptions& options)
    : index_(std::move(index)),
      options_(options),
      owner_(current_process()),
      traffic_(std::make_unique<Traffic>()) {}

DiskTier::~DiskTier() {
  if (current_process() != owner_) {
    // Its threads are not here, and its locks may be held for ever.
    static_cast<void>(traffic_.release());
    return;
  }
  for (const auto& [sample, each] : traffic_->ahead) {
    each.job->give_up();
  }
  if (traffic_->io != nullptr) {
    traffic_->io->stop(kStopPatience);
  }
}

bool DiskTier::usable(const std::atomic<int>& error) const noexcept {
  return error == 0 && current_process() == owner_;
}

void DiskTier::start_io() {
  if (options_.io != DiskIoKind::kThreads) {
    traffic_->io = make_uring_io(index_.file_descriptor());
  }
  if (traffic_->io != nullptr) {
    io_name_ = "io_uring";
  } else if (options_.io != DiskIoKind::kUring) {
    traffic_->io = make_thread_io(index_.file_descriptor(), kThreads);
    io_name_ = "threads";
  } else {
    throw std::system_error(ENOSYS, std::generic_category(), "io_uring");
  }
}

// False: nothing can read or write here, now and later.
bool DiskTier::submit(std::span<const std::shared_ptr<DiskJob>> jobs) {
  const std::lock_guard<std::mutex> lock(traffic_->mutex);
  if (traffic_->io == nullptr) {
    try {
      start_io();
    } catch (const std::system_error& error) {
      read_error_ = error.code().value();
      end_writing(error.code().value());
      return false;
    }
  }
  for (const std::shared_ptr<DiskJob>& job : jobs) {
    const bool reads = job->kind == DiskJob::Kind::kRead;
    job->count(reads ? traffic_->reads : traffic_->writes);
  }
  traffic_->io->submit(jobs);
  return true;
}

std::shared_ptr<DiskJob> DiskTier::read_job(const DiskIndex::Found& found) {
  std::shared_ptr<std::byte> data = traffic_->buffers->take(found.bytes);
  return data == nullptr ? nullptr
                         : std::make_shared<DiskJob>(
                               DiskJob::Kind::kRead,
                               std::move(data),
                               found.bytes,
                               found.begin);
}

void DiskTier::prefetch(std::span<const int64_t> samples) {
  if (!usable(read_error_)) {
    return;
  }
  std::vector<std::shared_ptr<DiskJob>> jobs;
  {
    const std::lock_guard<std::mutex> lock(traffic_->mutex);
    ++traffic_->turn;
    traffic_->drop_old();
    for (const int64_t id : samples) {
      const auto sample = static_cast<uint64_t>(id);
      DiskIndex::Found found;
      if (id < 0 || sample >= index_.num_samples() ||
          !index_.find(sample, found)) {
        continue;
      }
      if (const auto known = traffic_->ahead.find(sample);
          known != traffic_->ahead.end()) {
        known->second.turn = traffic_->turn;
        continue;
      }
      if (traffic_->ahead_bytes + found.bytes > options_.ahead_bytes) {
        break;
      }
      std::shared_ptr<DiskJob> job = read_job(found);
      if (job == nullptr) {
        break;
      }
      traffic_->ahead.emplace(
          sample, Traffic::Ahead{found.version, job, traffic_->turn});
      traffic_->ahead_bytes += found.bytes;
      jobs.push_back(std::move(job));
    }
  }
  if (!jobs.empty()) {
    submit(jobs);
  }
}

bool DiskTier::find(uint64_t sample, DiskIndex::Found& found) noexcept {
  return usable(read_error_) && index_.find(sample, found);
}

void DiskTier::fetch(
    std::span<Request> requests,
    std::chrono::milliseconds more) {
  if (!usable(read_error_)) {
    return;
  }
  const auto began = Clock::now();
  std::vector<std::shared_ptr<DiskJob>> wanted(requests.size());
  std::vector<std::shared_ptr<DiskJob>> jobs;
  uint64_t bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(traffic_->mutex);
    for (std::size_t k = 0; k < requests.size(); ++k) {
      wanted[k] = traffic_->take(requests[k].sample, requests[k].found.version);
    }
  }
  for (std::size_t k = 0; k < requests.size(); ++k) {
    if (wanted[k] == nullptr) {
      wanted[k] = read_job(requests[k].found);
      if (wanted[k] != nullptr) {
        jobs.push_back(wanted[k]);
      }
    }
    bytes += requests[k].found.bytes;
  }
  if (!jobs.empty() && !submit(jobs)) {
    return;
  }
  const auto deadline = Clock::now() + options_.patience + more +
                        milliseconds(bytes / kSlowBytesPerMs);
  for (std::size_t k = 0; k < requests.size(); ++k) {
    if (wanted[k] == nullptr) {
      continue;
    }
    if (wanted[k]->wait(deadline)) {
      judge(requests[k], std::move(wanted[k]));
    } else {
      wanted[k]->give_up();
    }
  }
  read_wait_ns_ += nanoseconds(Clock::now() - began).count();
}

// Says what became of a read that has ended.
void DiskTier::judge(Request& request, std::shared_ptr<DiskJob> job) {
  note_read(job->error());
  if (job->error() != 0) {
    return;
  }
  if (!index_.unchanged(request.sample, request.found.version)) {
    request.outcome = Outcome::kChanged;
    return;
  }
  RecordHeader header;
  std::memcpy(&header, job->data.get(), sizeof(header));
  if (header.checksum != header_checksum(header) ||
      header.sample != request.sample || !(header.key == request.found.key) ||
      header.payload_bytes > job->bytes - sizeof(header) ||
      !within_format(header.layout)) {
    index_.discard(request.sample, request.found.version);
    request.outcome = Outcome::kCorrupt;
    return;
  }
  request.outcome = Outcome::kRead;
  request.record.header_ = header;
  request.record.version_ = request.found.version;
  request.record.job_ = std::move(job);
}

ReadResult DiskTier::read(
    const Record& record,
    std::span<const Segment> segments) noexcept {
  if (payload_bytes(segments) != record.header_.payload_bytes) {
    discard(record);
    return ReadResult::kCorrupt;
  }
  const std::byte* from = record.job_->data.get() + sizeof(RecordHeader);
  for (const Segment& segment : segments) {
    std::memcpy(segment.data, from, segment.size);
    from += padded(segment.size);
  }
  if (payload_checksum(segments) != record.header_.payload_checksum) {
    discard(record);
    return ReadResult::kCorrupt;
  }
  return ReadResult::kRead;
}

void DiskTier::discard(const Record& record) noexcept {
  index_.discard(record.header_.sample, record.version_);
}

void DiskTier::drop(uint64_t sample) noexcept {
  DiskIndex::Found found;
  if (index_.find(sample, found)) {
    index_.discard(sample, found.version);
  }
}

void DiskTier::clear() noexcept {
  for (uint64_t sample = 0; sample < index_.num_samples(); ++sample) {
    drop(sample);
  }
}

DiskTraffic DiskTier::traffic() const noexcept {
  if (current_process() != owner_) {
    return {};  // a lock may be held for ever
  }
  return {
      traffic_->reads->total(),
      traffic_->writes->total(),
      nanoseconds(read_wait_ns_)};
}

void DiskTier::note_read(int error) noexcept {
  if (error == 0) {
    failed_reads_ = 0;
  } else if (error != ECANCELED && ++failed_reads_ >= kMostFailedReads) {
    read_error_ = error;
  }
}

void DiskTier::end_writing(int error) noexcept {
  int none = 0;
  write_error_.compare_exchange_strong(none, error);
}

DiskTier::Writes::~Writes() {
  finish();
}

WriteResult DiskTier::Writes::add(
    uint64_t sample,
    const RecordKey& key,
    const RecordLayout& layout,
    std::span<const Segment> segments) {
  if (!tier_.usable(tier_.write_error_)) {
    return WriteResult::kFull;
  }
  RecordHeader header;
  header.sample = sample;
  header.key = key;
  header.payload_bytes = payload_bytes(segments);
  header.layout = layout;
  const uint64_t record_bytes = sizeof(header) + header.payload_bytes;
  const uint64_t bytes = (record_bytes + DiskIndex::kBlockBytes - 1) /
                         DiskIndex::kBlockBytes * DiskIndex::kBlockBytes;
  while (!under_way_.empty() && bytes_ + bytes > kWriteBytes) {
    settle_oldest();
  }
  Write write;
  const WriteResult result = tier_.index_.claim(
      sample, key, encodings_of(layout), record_bytes, write.claim);
  if (result != WriteResult::kWritten) {
    return result;
  }
  const std::shared_ptr<std::byte> data = tier_.traffic_->buffers->take(bytes);
  if (data == nullptr) {
    tier_.index_.abandon(write.claim);
    return WriteResult::kFull;
  }
  std::byte* to = data.get() + sizeof(header);
  for (const Segment& segment : segments) {
    std::memcpy(to, segment.data, segment.size);
    std::memset(to + segment.size, 0, padded(segment.size) - segment.size);
    to += padded(segment.size);
  }
  std::memset(data.get() + record_bytes, 0, bytes - record_bytes);
  header.payload_checksum = payload_checksum(segments);
  header.checksum = header_checksum(header);
  std::memcpy(data.get(), &header, sizeof(header));
  write.job = std::make_shared<DiskJob>(
      DiskJob::Kind::kWrite, data, bytes, write.claim.begin);
  if (!tier_.submit({&write.job, 1})) {
    tier_.index_.abandon(write.claim);
    return WriteResult::kFull;
  }
  bytes_ += bytes;
  under_way_.push_back(std::move(write));
  return WriteResult::kWritten;
}

// A record that is late stays claimed: the system may write it at any time.
void DiskTier::Writes::settle_oldest() noexcept {
  const Write write = std::move(under_way_.front());
  under_way_.pop_front();
  bytes_ -= write.job->bytes;
  // Where writing has ended, what is not there by now is not waited for.
  const bool going = tier_.usable(tier_.write_error_);
  const auto patience = going ? tier_.options_.write_patience : milliseconds(0);
  if (!write.job->wait(Clock::now() + patience)) {
    write.job->give_up();
    tier_.end_writing(ETIMEDOUT);
  } else if (write.job->error() != 0) {
    tier_.index_.abandon(write.claim);
    tier_.end_writing(write.job->error());
  } else if (tier_.index_.publish(write.claim)) {
    ++stored_;
  }
}

uint64_t DiskTier::Writes::finish() noexcept {
  while (!under_way_.empty()) {
    settle_oldest();
  }
  return std::exchange(stored_, 0);
}

}  // namespace pipetransformer::autocache

// InitOptions are the options that a program gives to init().
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace sirtaki {

// InitOptions have a setter for each option of docs/configuration.md, by its name there:
//
//   sirtaki::init(sirtaki::InitOptions().stall_limit(std::chrono::minutes(10)).log_level("debug"));
//
// They override the environment. init() refuses a value that is not allowed.
class InitOptions {
 public:
  using Microseconds = std::chrono::microseconds;

  InitOptions& fusion_bytes(std::int64_t bytes) { return set("fusion_bytes", bytes); }
  InitOptions& small_bytes(std::int64_t bytes) { return set("small_bytes", bytes); }
  InitOptions& chunk_bytes(std::int64_t bytes) { return set("chunk_bytes", bytes); }
  InitOptions& bucket_bytes(std::int64_t bytes) { return set("bucket_bytes", bytes); }
  InitOptions& first_bucket_bytes(std::int64_t bytes) { return set("first_bucket_bytes", bytes); }
  InitOptions& pool_bytes(std::int64_t bytes) { return set("pool_bytes", bytes); }
  InitOptions& timeline_bytes(std::int64_t bytes) { return set("timeline_bytes", bytes); }

  InitOptions& fusion_delay(Microseconds time) { return set("fusion_delay", Text(time)); }
  InitOptions& start_timeout(Microseconds time) { return set("start_timeout", Text(time)); }
  InitOptions& stall_warning(Microseconds time) { return set("stall_warning", Text(time)); }
  InitOptions& stall_limit(Microseconds time) { return set("stall_limit", Text(time)); }
  InitOptions& ping_interval(Microseconds time) { return set("ping_interval", Text(time)); }
  InitOptions& peer_timeout(Microseconds time) { return set("peer_timeout", Text(time)); }
  InitOptions& metrics_interval(Microseconds time) { return set("metrics_interval", Text(time)); }
  InitOptions& nccl_limit(Microseconds time) { return set("nccl_limit", Text(time)); }

  InitOptions& id_capacity(int count) { return set("id_capacity", count); }
  InitOptions& tree_arity(int count) { return set("tree_arity", count); }
  InitOptions& intra_op_threads(int count) { return set("intra_op_threads", count); }
  InitOptions& nccl_direct(bool yes) { return set("nccl_direct", yes); }
  InitOptions& nccl_max_ctas(int count) { return set("nccl_max_ctas", count); }

  InitOptions& log_time(bool yes = true) { return set("log_time", yes); }
  InitOptions& deterministic(bool yes = true) { return set("deterministic", yes); }
  InitOptions& autotune(bool yes = true) { return set("autotune", yes); }
  InitOptions& summary(bool yes = true) { return set("summary", yes); }
  InitOptions& verify_transfers(bool yes = true) { return set("verify_transfers", yes); }

  // These take one of the words that the page has for the option.
  InitOptions& wait(std::string word) { return set("wait", std::move(word)); }
  InitOptions& log_level(std::string word) { return set("log_level", std::move(word)); }
  InitOptions& shared_memory(std::string word) { return set("shared_memory", std::move(word)); }
  InitOptions& transport(std::string word) { return set("transport", std::move(word)); }
  InitOptions& medium(std::string word) { return set("medium", std::move(word)); }
  InitOptions& mpi_family(std::string word) { return set("mpi_family", std::move(word)); }
  InitOptions& hierarchy(std::string word) { return set("hierarchy", std::move(word)); }
  InitOptions& allocator(std::string word) { return set("allocator", std::move(word)); }
  InitOptions& gradient_arena(std::string word) { return set("gradient_arena", std::move(word)); }
  InitOptions& shard(std::string word) { return set("shard", std::move(word)); }
  InitOptions& nccl_cta_policy(std::string word) { return set("nccl_cta_policy", std::move(word)); }

  InitOptions& timeline(std::string path) { return set("timeline", std::move(path)); }
  InitOptions& metrics_file(std::string path) { return set("metrics_file", std::move(path)); }
  InitOptions& flight_records(std::string path) { return set("flight_records", std::move(path)); }
  InitOptions& autotune_log(std::string path) { return set("autotune_log", std::move(path)); }
  InitOptions& settings(std::string path) { return set("settings", std::move(path)); }

  // Makes a process set of these ranks at the end of init(), as add_process_set would; see
  // initial_process_sets(). All ranks must name the same sets in the same order.
  InitOptions& process_set(std::vector<int> ranks) {
    process_sets_.push_back(std::move(ranks));
    return *this;
  }

  // Sets any option by its name, to a text as the command line has it: set("stall_limit", "10min").
  // init() refuses a name that it does not know.
  InitOptions& set(std::string option, std::string value) {
    values_.emplace_back(std::move(option), std::move(value));
    return *this;
  }
  InitOptions& set(std::string option, const char* value) {
    return set(std::move(option), std::string(value));
  }
  // Sets a number; times are in seconds.
  template <class T, std::enable_if_t<std::is_arithmetic<T>::value, int> = 0>
  InitOptions& set(std::string option, T value) {
    if (std::is_same<T, bool>::value) return set(std::move(option), value ? "true" : "false");
    return set(std::move(option), std::to_string(value));
  }

  const std::vector<std::pair<std::string, std::string>>& values() const { return values_; }
  const std::vector<std::vector<int>>& process_sets() const { return process_sets_; }

 private:
  static std::string Text(Microseconds time) { return std::to_string(time.count()) + "us"; }

  std::vector<std::pair<std::string, std::string>> values_;
  std::vector<std::vector<int>> process_sets_;
};

}  // namespace sirtaki

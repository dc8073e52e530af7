#include "frameworks/torch/checkpoint/checkpoint_shards.h"

#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "core/base/log.h"
#include "frameworks/torch/checkpoint/checkpoint_file.h"
#include "frameworks/torch/checkpoint/checkpoint_reading.h"

namespace sirtaki::detail {
namespace {

using torch::serialize::OutputArchive;
namespace fs = std::filesystem;

constexpr std::size_t kSaveDigits = 16;

std::string BeginOfNames(const std::string& path) {
  return fs::path(path).filename().string() + ".shards.";
}

// Whether the file has shards of another save than this one; "": of any.
bool IsOfOtherSave(const std::string& name, const std::string& path, const std::string& save) {
  const std::string begin = BeginOfNames(path);
  if (!name.starts_with(begin)) return false;
  const std::string number = name.substr(begin.size(), name.find('.', begin.size()) - begin.size());
  return number.size() == kSaveDigits && number != save &&
         number.find_first_not_of("0123456789abcdef") == std::string::npos;
}

}  // namespace

GradientReducer* ShardedOf(torch::optim::Optimizer& optimizer) {
  GradientReducer* const reducer = ReducerOf(optimizer);
  return reducer != nullptr && reducer->has_sharded_state() ? reducer : nullptr;
}

bool HasShards(const CheckpointParts& parts) {
  return std::any_of(parts.optimizers.begin(), parts.optimizers.end(),
                     [](const auto& one) { return ShardedOf(*one.part) != nullptr; });
}

std::string MakeNumberOfSave() {
  std::random_device device;
  char digits[kSaveDigits + 1];
  std::snprintf(digits, sizeof(digits), "%08x%08x", device(), device());
  return digits;
}

ShardFiles::ShardFiles(std::string path, std::string save, int ranks)
    : path_(std::move(path)), save_(std::move(save)) {
  for (int rank = 0; rank < ranks && !save_.empty(); ++rank) {
    names_.push_back(BeginOfNames(path_) + save_ + "." + std::to_string(rank) + "-of-" +
                     std::to_string(ranks));
  }
}

void ShardFiles::Save(const CheckpointParts& parts, OutputArchive& archive) const {
  archive.write("save", c10::IValue(save_));
  OutputArchive all(archive.compilation_unit());
  for (std::size_t i = 0; i < parts.optimizers.size(); ++i) {
    torch::optim::Optimizer& optimizer = *parts.optimizers[i].part;
    GradientReducer* const sharded = ShardedOf(optimizer);
    // Other sets have the same parameters in shards of their own.
    if (sharded == nullptr || sharded->shard_set().ranks().front() != 0) continue;
    OutputArchive one(archive.compilation_unit());
    sharded->SaveShards(optimizer, one);
    all.write(std::to_string(i), one);
  }
  archive.write("optimizers", all);
}

// The folder is read anew: a host may remember for a while that a file was not there.
bool ShardFiles::AreThere() const {
  if (names_.empty()) return true;
  std::size_t found = 0;
  for (const auto& entry : fs::directory_iterator(Beside(path_, "."))) {
    found += static_cast<std::size_t>(
        std::count(names_.begin(), names_.end(), entry.path().filename().string()));
  }
  return found == names_.size();
}

void ShardFiles::Remove(int rank) const {
  if (names_.empty()) return;
  std::error_code ignored;
  fs::remove(Beside(path_, names_[static_cast<std::size_t>(rank)]), ignored);
}

void ShardFiles::RemoveOthers() const {
  try {
    for (const auto& entry : fs::directory_iterator(Beside(path_, "."))) {
      if (IsOfOtherSave(entry.path().filename().string(), path_, save_)) fs::remove(entry.path());
    }
  } catch (const fs::filesystem_error& error) {
    SIRTAKI_LOG(kWarning, "save_checkpoint: the shards of an earlier save stay: " << error.what());
  }
}

}  // namespace sirtaki::detail

#include "frameworks/torch/checkpoint/checkpoint_shards.h"

#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <system_error>
#include <type_traits>
#include <unordered_set>
#include <utility>

#include "core/base/log.h"
#include "frameworks/torch/checkpoint/checkpoint_file.h"
#include "frameworks/torch/checkpoint/checkpoint_reading.h"
#include "frameworks/torch/checkpoint/checkpoint_sections.h"
#include "frameworks/torch/state/sharded_state.h"

namespace sirtaki::detail {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
namespace fs = std::filesystem;

std::string BeginOfNames(const std::string& path) {
  return fs::path(path).filename().string() + ".shards.";
}

// Whether the file has shards of another save than this one; "": of any.
bool IsOfOtherSave(const std::string& name, const std::string& path, const std::string& save) {
  const std::string begin = BeginOfNames(path);
  if (!name.starts_with(begin)) return false;
  const std::string number = name.substr(begin.size(), name.find('.', begin.size()) - begin.size());
  return number != save && IsNumberOfSave(number);
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
core::RankRanges ShardFiles::Missing() const {
  core::RankRanges missing;
  if (names_.empty()) return missing;
  std::unordered_set<std::string> there;
  for (const auto& entry : fs::directory_iterator(Beside(path_, "."))) {
    there.insert(entry.path().filename().string());
  }
  for (std::size_t rank = 0; rank < names_.size(); ++rank) {
    if (!there.contains(names_[rank])) missing.Add(static_cast<int>(rank));
  }
  return missing;
}

void ShardFiles::Remove(int rank) const {
  if (names_.empty()) return;
  std::error_code ignored;
  fs::remove(Beside(path_, names_[static_cast<std::size_t>(rank)]), ignored);
}

std::vector<std::string> ShardFiles::Others() const {
  std::vector<std::string> others;
  try {
    for (const auto& entry : fs::directory_iterator(Beside(path_, "."))) {
      if (!IsOfOtherSave(entry.path().filename().string(), path_, save_)) continue;
      others.push_back(entry.path().string());
    }
  } catch (const fs::filesystem_error& error) {
    SIRTAKI_LOG(kWarning, "save_checkpoint: the shards of an earlier save stay: " << error.what());
  }
  return others;
}

std::vector<ShardOfParameter> CutAgain(GradientReducer& reducer,
                                       const torch::optim::Optimizer& optimizer) {
  reducer.CutParameters(optimizer);
  return reducer.shards();
}

std::function<void()> SetAside(torch::optim::Optimizer& optimizer) {
  struct Before {
    std::remove_reference_t<decltype(optimizer.state())> state;
    std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  };
  auto before = std::make_shared<Before>();
  for (const auto& group : optimizer.param_groups()) {
    before->options.push_back(group.options().clone());
  }
  before->state.swap(optimizer.state());
  GradientReducer* const reducer = ReducerOf(optimizer);
  const bool sharded = ShardedOf(optimizer) != nullptr;
  return [&optimizer, before, reducer, sharded] {
    before->state.swap(optimizer.state());
    if (reducer != nullptr) reducer->set_sharded_state(sharded);
    for (std::size_t g = 0; g < before->options.size(); ++g) {
      optimizer.param_groups()[g].set_options(std::move(before->options[g]));
    }
  };
}

bool LoadedParts::CanReadOwnShards(const std::string& path) const {
  for (std::size_t i = 0; i < keys_in_shards_.size(); ++i) {
    const GradientReducer* const reducer = ReducerOf(*parts_.optimizers[i].part);
    const bool is_sharded = reducer != nullptr && reducer->is_sharded();
    if (!keys_in_shards_[i].empty() && !is_sharded) return false;
  }
  return std::all_of(shards_.begin(), shards_.end(), [&path](const std::string& name) {
    return CheckpointReader::Open(Beside(path, name)) != nullptr;
  });
}

void LoadedParts::ReadShards(const std::string& path, bool only_own) {
  struct InShards {
    std::string key;
    torch::optim::Optimizer* optimizer;
    std::unique_ptr<ShardsOfAllRanks> shards;
  };
  std::vector<InShards> in_shards;
  for (std::size_t i = 0; i < keys_in_shards_.size(); ++i) {
    if (keys_in_shards_[i].empty()) continue;
    torch::optim::Optimizer& optimizer = *parts_.optimizers[i].part;
    undo_.push_back(SetAside(optimizer));
    InShards& one = in_shards.emplace_back(InShards{keys_in_shards_[i], &optimizer, nullptr});
    one.shards = only_own ? std::make_unique<ShardsOfAllRanks>(
                                optimizer, CutAgain(*ReducerOf(optimizer), optimizer))
                          : std::make_unique<ShardsOfAllRanks>(optimizer);
  }
  // One file after the other: together they are as large as the state.
  for (const std::string& file : shards_) {
    const auto reader = OpenShardFile(path, file);
    InputArchive of_rank;
    reader->LoadWithoutElements(&of_rank);
    CheckSave(path, file, of_rank);
    InputArchive optimizers = ReadNested(of_rank, "optimizers", "optimizers");
    const auto read = [&reader](const at::Tensor& from, const at::Tensor& to) {
      reader->ReadElements(from, to);
    };
    for (const auto& [key, optimizer, shards] : in_shards) {
      InputArchive one;
      if (!optimizers.try_read(key, one) || shards->Add(one, read)) continue;
      InputArchive with_elements;
      reader->Load(&with_elements);
      InputArchive all = ReadNested(with_elements, "optimizers", "optimizers");
      InputArchive again = ReadNested(all, key, "optimizer " + key);
      shards->Add(again);
    }
  }
  for (const auto& [key, optimizer, shards] : in_shards) {
    shards->Finish();
    if (only_own) ReducerOf(*optimizer)->set_sharded_state(true);
  }
}

}  // namespace sirtaki::detail

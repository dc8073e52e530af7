#include "sirtaki/checkpoint.h"

#include <torch/serialize/archive.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "core/base/log.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/checkpoint/checkpoint_file.h"
#include "frameworks/torch/checkpoint/checkpoint_sections.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/broadcast.h"
#include "sirtaki/collectives.h"
#include "sirtaki/error.h"
#include "sirtaki/objects.h"

namespace sirtaki {
namespace {

using detail::CheckpointParts;
using detail::SessionState;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
namespace fs = std::filesystem;
using StatePtr = std::shared_ptr<SessionState>;

// The text of what it throws; empty if it throws nothing.
template <class Call>
std::string ErrorOf(const Call& call) {
  try {
    call();
    return {};
  } catch (...) {
    return detail::TextOfCurrent();
  }
}

// Every rank must have the same parts. `what`: save_checkpoint or load_checkpoint.
StatePtr Begin(const std::string& what, const CheckpointParts& parts) {
  const StatePtr state = detail::CurrentSession();
  detail::ThrowIfError(state->Check());
  detail::AgreeOnList(what, detail::DescribeParts(parts), detail::WhyNoCheckpoint(parts), state);
  return state;
}

// Returns the states of all ranks, a row each, for every generator. Collective.
std::vector<at::Tensor> GatherGeneratorStates(const CheckpointParts& parts) {
  std::vector<at::Tensor> states;
  for (const auto& [name, generator] : detail::GeneratorsOf(parts)) {
    states.push_back(
        allgather(detail::StateOfGenerator(generator).unsqueeze(0),
                  AllgatherOptions().name("sirtaki/save_checkpoint/generator " + name)));
  }
  return states;
}

// ---- files of shards ----

constexpr std::size_t kSaveDigits = 16;

// The files of a save have its number, so that those of the save before stay until the new file has
// taken the place of the old one.
std::string BeginOfShards(const std::string& path) {
  return fs::path(path).filename().string() + ".shards.";
}

std::string ShardName(const std::string& path, const std::string& save, int rank, int ranks) {
  return BeginOfShards(path) + save + "." + std::to_string(rank) + "-of-" + std::to_string(ranks);
}

std::string Beside(const std::string& path, const std::string& name) {
  return (fs::path(path).parent_path() / name).string();
}

// The number of a save, the same on all ranks and another one each time. Collective.
std::string NumberOfSave() {
  std::random_device device;
  char digits[kSaveDigits + 1];
  std::snprintf(digits, sizeof(digits), "%08x%08x", device(), device());
  return broadcast_object(std::string(digits), 0, "sirtaki/save_checkpoint/number");
}

void WriteShardFile(const std::string& path, const std::string& save,
                    const CheckpointParts& parts) {
  OutputArchive archive;
  archive.write("save", c10::IValue(save));
  detail::WriteShards(parts, archive);
  detail::NewCheckpointFile(path, archive).Replace();
}

// Whether the file has shards of another save than this one; "": of any.
bool IsOldShard(const std::string& name, const std::string& path, const std::string& save) {
  const std::string begin = BeginOfShards(path);
  if (!name.starts_with(begin)) return false;
  const std::string number = name.substr(begin.size(), name.find('.', begin.size()) - begin.size());
  return number.size() == kSaveDigits && number != save &&
         number.find_first_not_of("0123456789abcdef") == std::string::npos;
}

void RemoveOldShards(const std::string& path, const std::string& save) {
  try {
    for (const auto& entry : fs::directory_iterator(Beside(path, "."))) {
      if (IsOldShard(entry.path().filename().string(), path, save)) fs::remove(entry.path());
    }
  } catch (const fs::filesystem_error& error) {
    SIRTAKI_LOG(kWarning, "save_checkpoint: the shards of an earlier save stay: " << error.what());
  }
}

void ReadShardFile(const std::string& path, const std::string& name, InputArchive* archive) {
  const std::string file = Beside(path, name);
  if (!detail::ReadCheckpointFile(file, archive)) {
    throw std::runtime_error(file +
                             " is missing: the file of a rank's shards of the optimizer's state");
  }
  c10::IValue save;
  const bool fits = archive->try_read("save", save) &&
                    name.find("." + save.toStringRef() + ".") != std::string::npos;
  if (!fits) throw std::runtime_error(file + " is of another save");
}

// Rank 0 reads the file. Returns what the others need beside models and optimizers; empty if there
// is no file.
std::string ReadFile(const std::string& path, detail::LoadedParts& loaded) {
  InputArchive archive;
  if (!detail::ReadCheckpointFile(path, &archive)) return {};
  std::string for_others;
  const std::string error = ErrorOf([&] {
    for_others = loaded.ReadAll(archive, [&path](const std::string& name, InputArchive* shards) {
      ReadShardFile(path, name, shards);
    });
  });
  if (!error.empty()) throw std::runtime_error(path + ": " + error);
  return for_others;
}

}  // namespace

void save_checkpoint(const std::string& path, const Checkpoint& checkpoint) {
  const CheckpointParts& parts = checkpoint.parts();
  const StatePtr state = Begin("save_checkpoint", parts);
  const auto generator_states = GatherGeneratorStates(parts);
  const int rank = state->topology().rank;
  const int ranks = state->topology().size;
  const std::string save = detail::HasShards(parts) ? NumberOfSave() : "";
  std::vector<std::string> shards;
  for (int r = 0; !save.empty() && r < ranks; ++r)
    shards.push_back(ShardName(path, save, r, ranks));
  const std::string my_shards =
      save.empty() ? "" : Beside(path, shards[static_cast<std::size_t>(rank)]);
  std::optional<detail::NewCheckpointFile> file;
  const std::string write_error = ErrorOf([&] {
    if (!save.empty()) WriteShardFile(my_shards, save, parts);
    if (rank != 0) return;
    OutputArchive archive;
    detail::WriteParts(ranks, parts, generator_states, shards, archive);
    file.emplace(path, archive);
  });
  // It throws, too, after a fault of any rank that was found until now: what was read from a GPU
  // may be what a collective that was broken off has left there. Only now is that known, since to
  // read it was to wait for the GPU.
  try {
    detail::AgreeOnErrors("save_checkpoint", write_error, state);
  } catch (const Error& error) {
    // All ranks have this error, so no file will name these shards. After a fault rank 0 may not
    // know of it, and its file may.
    std::error_code ignored;
    if (error.code() == ErrorCode::InvalidArgument && !my_shards.empty()) {
      fs::remove(my_shards, ignored);
    }
    throw;
  }
  const std::string error = ErrorOf([&] {
    if (!file) return;
    file->Replace();
    RemoveOldShards(path, save);
  });
  detail::AgreeOnErrors("save_checkpoint", error, state);
}

bool load_checkpoint(const std::string& path, const Checkpoint& checkpoint) {
  const CheckpointParts& parts = checkpoint.parts();
  const StatePtr state = Begin("load_checkpoint", parts);
  const detail::Reader reader = {state->topology().rank, state->topology().size};
  const bool is_root = reader.rank == 0;
  detail::LoadedParts loaded(parts, reader);
  std::string bytes;
  std::string error = ErrorOf([&] {
    if (is_root) bytes = ReadFile(path, loaded);
  });
  detail::AgreeOnErrors("load_checkpoint", error, state);

  bytes = broadcast_object(bytes, 0, "sirtaki/load_checkpoint/parts");
  if (bytes.empty()) return false;
  if (!is_root) error = ErrorOf([&] { loaded.ReadBytes(bytes); });
  detail::AgreeOnErrors("load_checkpoint", error, state);
  error = ErrorOf([&] { loaded.Apply(); });
  detail::AgreeOnErrors("load_checkpoint", error, state);

  for (const auto& one : parts.models) broadcast_parameters(*one.part, 0);
  for (const auto& one : parts.optimizers) broadcast_optimizer_state(*one.part, 0);
  if (is_root && loaded.writers() != reader.ranks) {
    SIRTAKI_LOG(kWarning, "load_checkpoint: " << path << " was written by " << loaded.writers()
                                              << " ranks and is read by " << reader.ranks
                                              << ": random generators get new seeds");
  }
  return true;
}

}  // namespace sirtaki

#include "sirtaki/checkpoint.h"

#include <sys/stat.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/base/log.h"
#include "core/base/rank_ranges.h"
#include "core/base/types.h"
#include "core/protocol/mismatch.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/checkpoint/checkpoint_file.h"
#include "frameworks/torch/checkpoint/checkpoint_reading.h"
#include "frameworks/torch/checkpoint/checkpoint_save.h"
#include "frameworks/torch/checkpoint/checkpoint_sections.h"
#include "frameworks/torch/checkpoint/checkpoint_shards.h"
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
StatePtr Begin(const std::string& what, const CheckpointParts& parts,
               const CheckpointOptions& options) {
  const StatePtr state = detail::CurrentSession();
  detail::ThrowIfError(state->Check());
  std::vector<std::string> lines = detail::DescribeParts(parts);
  if (options.write_behind()) {
    lines.push_back("write_behind, timeout " + std::to_string(options.timeout().count()) + " ms");
  }
  std::string error = detail::WhyNoCheckpoint(parts);
  if (options.timeout().count() < 0) error = detail::NegativeTimeoutText(options.timeout());
  detail::AgreeOnList(what, lines, error, state);
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

// The number of a save is the same on all ranks, and another one each time. It is empty if rank 0 has
// no shards: those of its process set are saved, and ranks of other sets may have some all the same,
// or none when it has. Collective.
std::string NumberOfSave(const CheckpointParts& parts) {
  return broadcast_object(detail::HasShards(parts) ? detail::MakeNumberOfSave() : std::string(), 0,
                          "sirtaki/save_checkpoint/number");
}

// Rank 0 looks for the shards of all ranks, which have written them: on another host perhaps, into a
// folder of this name that is on that host's own disk. Where hosts share the folder, this one may
// remember for a while what was in it: over NFS for a minute, which is its acdirmax. Nothing tells of a
// file that another host has written, so this looks again and again.
void AwaitShards(const detail::CheckpointSave& save, const StatePtr& state) {
  if (!save.is_root()) return;
  const core::Duration apart = detail::LongestApart(state->session().config().stall_limit);
  const auto until =
      std::chrono::steady_clock::now() + std::min<core::Duration>(std::chrono::minutes(1), apart);
  for (;;) {
    const core::RankRanges missing = save.MissingShards();
    // After a fault the ranks do not meet any more.
    if (missing.empty() || !state->Check().ok()) return;
    if (std::chrono::steady_clock::now() >= until) {
      throw std::runtime_error(save.path() + ": the shards of " + core::RanksText(missing) +
                               " are not in its folder, which has to be one that all hosts share: "
                               "nothing is saved, and the checkpoint before stays");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

// Rank 0 reads the file. Returns what the others need beside models and optimizers; empty if there
// is no file.
std::string ReadFile(const std::string& path, detail::LoadedParts& loaded) {
  InputArchive archive;
  if (!detail::ReadCheckpointFile(path, &archive)) return {};
  std::string for_others;
  const std::string error = ErrorOf([&] { for_others = loaded.ReadAll(archive); });
  if (!error.empty()) throw std::runtime_error(path + ": " + error);
  return for_others;
}

// Another text where the files are others, as those of another host may be.
std::string IdentityOf(const std::string& path, const std::vector<std::string>& shards) {
  std::ostringstream text;
  for (const std::string& name : shards) {
    struct stat of {};
    if (::stat(detail::Beside(path, name).c_str(), &of) != 0) continue;
    text << of.st_ino << " " << of.st_size << " " << of.st_mtim.tv_sec << "." << of.st_mtim.tv_nsec
         << ", ";
  }
  return text.str();
}

// Where every rank finds the files and has shards of its own, each checks some of the files and reads
// what it needs; else rank 0 does all of it, and the ranks get the state from it. Collective.
void ReadShards(const std::string& path, detail::LoadedParts& loaded, const StatePtr& state) {
  if (loaded.shards().empty()) return;
  const core::Topology& topology = state->topology();
  const int rank = topology.rank;
  const int ranks = topology.size;
  // A file that this rank cannot open is not there for it.
  bool each = false;
  (void)ErrorOf([&] { each = ranks > 1 && loaded.CanReadOwnShards(path); });
  const bool same =
      ranks == 1 ||
      detail::ExchangeLists("load_checkpoint/shards", {each ? "yes" : "no"}, "", state).empty();
  const bool only_own = each && same;
  const auto together = [&](const auto& call) {
    const std::string error = ErrorOf(call);
    detail::AgreeOnErrors("load_checkpoint", error.empty() ? error : path + ": " + error, state);
  };
  // Where hosts have copies of their own, each host checks what it has.
  const bool are_copies = only_own && topology.local_size < ranks &&
                          !detail::ExchangeLists("load_checkpoint/files",
                                                 {IdentityOf(path, loaded.shards())}, "", state)
                               .empty();
  const int self = are_copies ? topology.local_rank : rank;
  const int sharing = are_copies ? topology.local_size : ranks;
  together([&] {
    int number = 0;
    for (const std::string& name : loaded.shards()) {
      if (only_own ? number++ % sharing == self : rank == 0) {
        detail::OpenShardFile(path, name)->CheckSum();
      }
    }
  });
  together([&] {
    if (only_own || rank == 0) loaded.ReadShards(path, only_own);
  });
}

}  // namespace

void save_checkpoint(const std::string& path, const Checkpoint& checkpoint,
                     const CheckpointOptions& options) {
  const CheckpointParts& parts = checkpoint.parts();
  finish_checkpoint();
  const StatePtr state = Begin("save_checkpoint", parts, options);
  const auto generator_states = GatherGeneratorStates(parts);
  const int ranks = state->topology().size;
  // The program may change its directory before all is written.
  std::error_code unknown;
  std::string place = std::filesystem::absolute(path, unknown).string();
  if (unknown) place = path;
  const detail::ShardFiles shards(place, NumberOfSave(parts), ranks);
  auto save = std::make_unique<detail::CheckpointSave>(place, shards, state->topology().rank);
  const std::string write_error = ErrorOf([&] {
    if (!shards.names().empty()) {
      OutputArchive archive;
      shards.Save(parts, archive);
      save->TakeShards(std::move(archive));
    }
    if (save->is_root()) {
      OutputArchive archive;
      detail::WriteParts(ranks, parts, generator_states, shards.names(), archive);
      save->TakeRest(std::move(archive));
    }
    if (options.write_behind()) return save->Copy();
    save->Write();
    save->Name();
  });
  // It throws, too, after a fault of any rank that was found until now: what was read from a GPU
  // may be what a collective that was broken off has left there. Only now is that known, since to
  // read it was to wait for the GPU.
  const auto agree = [&](const std::string& own_error) {
    try {
      detail::AgreeOnErrors("save_checkpoint", own_error, state);
    } catch (const Error& error) {
      // All ranks have this error, so no file will name these shards. After a fault rank 0 may not
      // know of it, and its file may.
      if (error.code() == ErrorCode::InvalidArgument) save->Withdraw();
      throw;
    }
  };
  agree(write_error);
  if (options.write_behind()) {
    state->SetSave(detail::SaveBehind::Start(std::move(save), options.timeout(), state));
    return;
  }
  if (!shards.names().empty()) agree(ErrorOf([&] { AwaitShards(*save, state); }));
  detail::AgreeOnErrors("save_checkpoint", ErrorOf([&] {
                          if (!save->is_root()) return;
                          save->Publish();
                          save->RemoveEarlier();
                        }),
                        state);
}

void finish_checkpoint() {
  const StatePtr state = detail::CurrentSession();
  detail::ThrowIfError(state->Check());
  const auto save = state->save();
  if (!save) return;
  // One that fails stays, since its thread may still write, from the copy that it has.
  save->Finish(state);
  state->SetSave(nullptr);
}

bool load_checkpoint(const std::string& path, const Checkpoint& checkpoint) {
  const CheckpointParts& parts = checkpoint.parts();
  // What was given up, on all ranks, does not come any more.
  const auto save = detail::CurrentSession()->save();
  if (!save || !save->is_given_up()) finish_checkpoint();
  const StatePtr state = Begin("load_checkpoint", parts, {});
  const detail::Reader reader = {state->topology().rank, state->topology().size};
  const bool is_root = reader.rank == 0;
  detail::LoadedParts loaded(parts, reader);
  std::string bytes;
  const auto together = [&state](const auto& call) {
    detail::AgreeOnErrors("load_checkpoint", ErrorOf(call), state);
  };
  together([&] {
    if (is_root) bytes = ReadFile(path, loaded);
  });
  bytes = broadcast_object(bytes, 0, "sirtaki/load_checkpoint/parts");
  if (bytes.empty()) return false;
  together([&] {
    if (!is_root) loaded.ReadBytes(bytes);
  });
  ReadShards(path, loaded, state);
  together([&] { loaded.Apply(); });

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

// The parts of a checkpoint, to and from an archive. Of one rank; nothing here is collective.
//
//   format, ranks                      int
//   model_parameters, model_buffers    {model: {name: tensor}}
//   optimizer_names                    [optimizer]
//   optimizer_parameters               {optimizer: [what each parameter is]}
//   optimizers                         archives of their own, "0", "1", … in the order of the names.
//                                      Format 2: without those whose state is in shards
//   shards                             format 2: the name of each rank's file of shards; these have
//                                      save, the number of the save, and optimizers, which have
//                                      begins, counts and (since sirtaki-checkpoint) strides of
//                                      the parameters beside what SaveOptimizer writes of shards
//   schedulers                         {scheduler: {member: number}}
//   integers, numbers, texts, tensors  {value: …}
//   object_names, objects              as optimizers
//   generators                         {generator: uint8 tensor [ranks, bytes]}
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "frameworks/torch/checkpoint/checkpoint_generators.h"
#include "sirtaki/checkpoint.h"

namespace sirtaki::detail {

// Why a checkpoint of these parts cannot be; empty if it can.
std::string WhyNoCheckpoint(const CheckpointParts& parts);

// One line a part and a tensor, for comparing the ranks.
std::vector<std::string> DescribeParts(const CheckpointParts& parts);

// All of it. `generator_states`: of all ranks, in the order of GeneratorsOf. `shards`: the names of
// the files of shards; empty: no optimizer has sharded state. Throws what an object's or an
// optimizer's save() throws.
void WriteParts(int ranks, const CheckpointParts& parts,
                const std::vector<at::Tensor>& generator_states,
                const std::vector<std::string>& shards, torch::serialize::OutputArchive& archive);

// One rank's parts on their way to what an archive says. Everything is read and checked beside the
// parts, and only Apply() puts it into them. The exceptions are optimizers and objects, which
// nobody but their own load() can read: what they were is kept, and is given back by the destructor
// if Apply() was not called.
//
// The readers throw std::runtime_error, or what LibTorch and objects throw, if something is missing
// or does not fit.
class LoadedParts {
 public:
  LoadedParts(const CheckpointParts& parts, const Reader& reader);
  ~LoadedParts();
  LoadedParts(const LoadedParts&) = delete;
  LoadedParts& operator=(const LoadedParts&) = delete;

  // Rank 0 reads all from the file, except optimizers whose state is in shards. Returns what the
  // others read, as bytes of an archive: all except models and optimizers. Refuses formats of newer
  // versions.
  std::string ReadAll(torch::serialize::InputArchive& archive);
  // The others read these bytes.
  void ReadBytes(const std::string& bytes);
  // The names of the files of shards that are to be read; none: no optimizer of ours is in shards.
  // Known on all ranks.
  const std::vector<std::string>& shards() const { return shards_; }
  // Whether this rank finds these files, and needs no more of the state than its own shards.
  bool CanReadOwnShards(const std::string& path) const;
  // Reads the optimizers whose state is in shards from files that were checked: only the state of
  // this rank's shards, or all of it. `path`: of the checkpoint.
  void ReadShards(const std::string& path, bool only_own);
  // The number of ranks that wrote the archive; ReadAll() knows it.
  int writers() const { return writers_; }

  void Apply();

 private:
  void ReadModels(torch::serialize::InputArchive& archive);
  void ReadOptimizers(torch::serialize::InputArchive& archive);
  void ReadSchedulers(torch::serialize::InputArchive& archive);
  void ReadValues(torch::serialize::InputArchive& archive);
  void ReadObjects(torch::serialize::InputArchive& archive);
  // If as many ranks wrote it, each takes its own generator states; else all are seeded again.
  void ReadGenerators(torch::serialize::InputArchive& archive);
  void ReadSmallParts(torch::serialize::InputArchive& archive);

  const CheckpointParts& parts_;
  const Reader reader_;
  int writers_ = 0;
  std::vector<std::string> shards_;
  std::vector<std::string> keys_in_shards_;  // by optimizer; empty: it is not in shards
  std::vector<std::function<void()>> apply_;
  std::vector<std::function<void()>> undo_;  // the last first
};

}  // namespace sirtaki::detail

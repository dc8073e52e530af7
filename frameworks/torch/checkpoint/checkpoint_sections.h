// The parts of a checkpoint, to and from an archive. Of one rank; nothing here is collective.
//
//   format, ranks                      int
//   model_parameters, model_buffers    {model: {name: tensor}}
//   optimizer_names                    [optimizer]
//   optimizer_parameters               {optimizer: [what each parameter is]}
//   optimizers                         archives of their own, "0", "1", … in the order of the names
//   schedulers                         {scheduler: {member: number}}
//   integers, numbers, texts, tensors  {value: …}
//   object_names, objects              as optimizers
//   generators                         {generator: uint8 tensor [ranks, bytes]}
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "frameworks/torch/checkpoint/checkpoint_generators.h"
#include "frameworks/torch/checkpoint/scheduler_position.h"
#include "sirtaki/checkpoint.h"

namespace sirtaki::detail {

// An archive as a string of bytes.
std::string ToBytes(torch::serialize::OutputArchive& archive);

SchedulerPosition PositionOfAny(const decltype(CheckpointParts::schedulers)::value_type& scheduler);

// Throws what its save() throws, with its name.
void SaveObject(const NamedPart<ArchivedObject>& object, torch::serialize::OutputArchive& archive);

// Why a checkpoint of these parts cannot be; empty if it can.
std::string WhyNoCheckpoint(const CheckpointParts& parts);

// One line a part and a tensor, for comparing the ranks.
std::vector<std::string> DescribeParts(const CheckpointParts& parts);

// The header, models and optimizers.
void WriteHeader(int ranks, torch::serialize::OutputArchive& archive);
void WriteModels(const CheckpointParts& parts, torch::serialize::OutputArchive& archive);
void WriteOptimizers(const CheckpointParts& parts, torch::serialize::OutputArchive& archive);
// All others. `generator_states`: of all ranks, in the order of GeneratorsOf.
void WriteSmallParts(const CheckpointParts& parts, const std::vector<at::Tensor>& generator_states,
                     torch::serialize::OutputArchive& archive);

// The readers throw std::runtime_error, or what LibTorch and objects throw, if something is missing
// or does not fit.

// Refuses formats of newer versions. Returns the number of ranks that wrote the archive.
int ReadHeader(torch::serialize::InputArchive& archive);

// What the models will be, checked; nothing is changed before Apply(), which only copies.
class ReadModels {
 public:
  ReadModels(const CheckpointParts& parts, torch::serialize::InputArchive& archive);
  void Apply() const;

 private:
  struct Copy {
    at::Tensor from;
    at::Tensor to;
  };
  std::vector<Copy> copies_;
};

void LoadOptimizers(const CheckpointParts& parts, torch::serialize::InputArchive& archive);

// As WriteSmallParts takes them; undefined where the file has none of a GPU.
std::vector<at::Tensor> ReadGeneratorStates(const CheckpointParts& parts,
                                            torch::serialize::InputArchive& archive);

// If as many ranks wrote it, each takes its own generator states; else all are seeded anew.
void ReadSmallParts(const CheckpointParts& parts, const Reader& reader,
                    torch::serialize::InputArchive& archive);

}  // namespace sirtaki::detail

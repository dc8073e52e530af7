// Reading the files of a checkpoint, without the program that has saved it. Of one rank; nothing
// here is collective. What throws throws std::runtime_error, or what LibTorch throws.
#pragma once

#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "frameworks/torch/checkpoint/checkpoint_file.h"

namespace sirtaki::detail {

inline constexpr std::int64_t kFormat = 1;
inline constexpr std::int64_t kFormatOfShards = 2;

template <class T>
T Read(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  if (!archive.try_read(key, value)) throw std::runtime_error("it has no " + key);
  return value.to<T>();
}

torch::serialize::InputArchive ReadNested(torch::serialize::InputArchive& archive,
                                          const std::string& key, const std::string& what);

// Returns the format of a checkpoint. Throws if it is of a newer version of the library.
std::int64_t ReadFormat(torch::serialize::InputArchive& archive);

// The file of shards of this name, of the checkpoint `path`.
std::string Beside(const std::string& path, const std::string& name);
// The names of the files that a checkpoint tells of; none where no state is in shards.
std::vector<std::string> NamesOfShards(torch::serialize::InputArchive& archive);
// Opens one of them. `path`: of the checkpoint. Throws std::runtime_error if it is missing.
std::unique_ptr<CheckpointReader> OpenShardFile(const std::string& path, const std::string& name);
// Throws std::runtime_error if what was read of the file is of another save.
void CheckSave(const std::string& path, const std::string& name,
               torch::serialize::InputArchive& archive);
// Reads one of them. Throws std::runtime_error if it is missing, damaged or of another save.
void ReadShardFile(const std::string& path, const std::string& name,
                   torch::serialize::InputArchive* archive);

}  // namespace sirtaki::detail

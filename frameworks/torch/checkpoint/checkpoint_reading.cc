#include "frameworks/torch/checkpoint/checkpoint_reading.h"

#include <filesystem>
namespace sirtaki::detail {

using torch::serialize::InputArchive;

InputArchive ReadNested(InputArchive& archive, const std::string& key, const std::string& what) {
  InputArchive nested;
  if (!archive.try_read(key, nested)) throw std::runtime_error("it has no " + what);
  return nested;
}

std::int64_t ReadFormat(InputArchive& archive) {
  const auto format = Read<std::int64_t>(archive, "format");
  if (format > kFormatOfShards) {
    throw std::runtime_error("it has format " + std::to_string(format) +
                             ", of a newer version of the library; this one reads up to " +
                             std::to_string(kFormatOfShards));
  }
  return format;
}

std::string Beside(const std::string& path, const std::string& name) {
  return (std::filesystem::path(path).parent_path() / name).string();
}

std::vector<std::string> NamesOfShards(InputArchive& archive) {
  c10::IValue names;
  std::vector<std::string> shards;
  if (!archive.try_read("shards", names)) return shards;
  for (const c10::IValue& name : names.toListRef()) shards.push_back(name.toStringRef());
  return shards;
}

std::unique_ptr<CheckpointReader> OpenShardFile(const std::string& path, const std::string& name) {
  auto reader = CheckpointReader::Open(Beside(path, name));
  if (reader) return reader;
  throw std::runtime_error(Beside(path, name) +
                           " is missing: the file of a rank's shards of the optimizer's state");
}

void CheckSave(const std::string& path, const std::string& name, InputArchive& archive) {
  c10::IValue save;
  const bool fits = archive.try_read("save", save) &&
                    name.find("." + save.toStringRef() + ".") != std::string::npos;
  if (!fits) throw std::runtime_error(Beside(path, name) + " is of another save");
}

void ReadShardFile(const std::string& path, const std::string& name, InputArchive* archive) {
  const auto reader = OpenShardFile(path, name);
  reader->CheckSum();
  reader->Load(archive);
  CheckSave(path, name, *archive);
}

}  // namespace sirtaki::detail

// The file of a checkpoint: an archive of torch::serialize, which is a ZIP file, and behind it a
// checksum. LibTorch does not look at the checksums that ZIP itself has: it would load a file with
// flipped bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "core/base/descriptor.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace sirtaki::detail {

// Makes a number for a save that no other save has: 16 hexadecimal digits.
std::string MakeNumberOfSave();
bool IsNumberOfSave(std::string_view text);

// An archive that is to take the place of the file. What throws throws std::runtime_error, whose
// text names path and cause, and leaves the file as it was.
//
// It is first written to a file of a name of its own, "run.pt.NUMBER.tmp". The one that was begun last
// removes those of the others: what a save has left that has ended, and what one has that was left
// behind, as its disk hung. That one may wake at any time, and then cannot replace the file.
class NewCheckpointFile {
 public:
  // Takes all of these bytes, and returns their number.
  using Sink = std::function<std::size_t(const void* bytes, std::size_t count)>;

  // Writes it beside the file. It is on its way to the disk then.
  NewCheckpointFile(std::string path, torch::serialize::OutputArchive& archive);
  // `write`: writes a ZIP file of another kind.
  NewCheckpointFile(std::string path, const std::function<void(const Sink&)>& write);
  // What has not replaced the file is removed.
  ~NewCheckpointFile();
  NewCheckpointFile(const NewCheckpointFile&) = delete;
  NewCheckpointFile& operator=(const NewCheckpointFile&) = delete;

  void Sync();     // waits until it is on the disk
  void Replace();  // once; when it is on the disk

 private:
  std::string path_;       // empty: it was replaced
  std::string temporary_;  // its own file
  core::Descriptor file_;  // open to the end, so that no other file is taken for it
  bool is_synced_ = false;
};

// A file of a checkpoint that is read. What throws throws std::runtime_error, whose text names path
// and cause, or what LibTorch throws.
class CheckpointReader {
 public:
  // Null if there is no such file.
  static std::unique_ptr<CheckpointReader> Open(const std::string& path);

  // Throws if the file is damaged anywhere, or no checkpoint.
  void CheckSum() const;
  void Load(torch::serialize::InputArchive* archive) const;
  // Loads all but the elements of tensors, which ReadElements() gets where they are wanted.
  void LoadWithoutElements(torch::serialize::InputArchive* archive);
  // `from`: some elements of a tensor that was loaded without them. Both lie on the CPU without gaps.
  void ReadElements(const at::Tensor& from, const at::Tensor& to) const;

 private:
  CheckpointReader(std::string path, core::Descriptor file, std::uint64_t size);

  std::uint64_t archive_size() const;
  // Fewer only at the end of the file.
  std::size_t Read(std::uint64_t offset, void* into, std::size_t count) const;
  bool IsTensor(std::uint64_t header) const;

  const std::string path_;
  const core::Descriptor file_;
  const std::uint64_t size_;
  std::unordered_map<const void*, std::uint64_t> places_;  // in the file, of what was not read
};

// False if there is no such file. Throws std::runtime_error if it cannot be read, is damaged or
// no checkpoint.
bool ReadCheckpointFile(const std::string& path, torch::serialize::InputArchive* archive);

}  // namespace sirtaki::detail

#include "frameworks/torch/checkpoint/checkpoint_file.h"

#include <c10/core/Device.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <torch/serialize/archive.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/digest.h"

namespace sirtaki::detail {
namespace {

// What stands behind the archive: readers of ZIP files look for its end backwards, past this.
constexpr std::string_view kMark = "sirtaki checkpoint, XXH3 ";
constexpr std::size_t kDigits = 16;  // of a digest, and of the number of a save
constexpr std::string_view kTemporary = ".tmp";
constexpr std::size_t kWriteback = std::size_t{8} << 20;  // bytes that are sent to the disk at once
constexpr std::size_t kHeaderBytes = 30;                  // of a file within a ZIP file,
constexpr std::size_t kMostOfName = std::size_t{2} << 16;  // and what may stand behind it
constexpr std::size_t kTrailerBytes = kMark.size() + kDigits;

std::string TrailerOf(const core::RunningDigest& digest) {
  char digits[kDigits + 1];
  std::snprintf(digits, sizeof(digits), "%016" PRIx64, digest.Get());
  return std::string(kMark) + digits;
}

std::string FolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

std::string Cause(int error) { return std::generic_category().message(error); }

[[noreturn]] void Fail(const std::string& path, const std::string& what, int error) {
  throw std::runtime_error(path + ": " + what + ": " + Cause(error));
}

// Writes an archive as it is made, and the checksum behind it.
class ArchiveWriter {
 public:
  explicit ArchiveWriter(int fd) : fd_(fd) {}

  // Never reports a failure to LibTorch, whose writer would end the process: it throws in its
  // destructor then. The first error is kept and what follows it dropped.
  std::size_t Take(const void* bytes, std::size_t count) {
    digest_.Add(bytes, count);
    Write({static_cast<const char*>(bytes), count});
    return count;
  }

  // 0, or errno of the first failure.
  int Finish() {
    Write(TrailerOf(digest_));
    return error_;
  }

 private:
  void Write(std::string_view bytes) {
    while (error_ == 0 && !bytes.empty()) {
      const ssize_t written = write(fd_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) error_ = errno;
      if (written > 0) bytes.remove_prefix(static_cast<std::size_t>(written));
      if (written > 0) StartWriteback(static_cast<std::size_t>(written));
    }
  }

  // The disk works while the rest of the archive is made. What fails here fails again in fsync.
  void StartWriteback(std::size_t written) {
    unstarted_ += written;
    if (unstarted_ < kWriteback) return;
    (void)sync_file_range(fd_, static_cast<off_t>(end_), static_cast<off_t>(unstarted_),
                          SYNC_FILE_RANGE_WRITE);
    end_ += std::exchange(unstarted_, 0);
  }

  const int fd_;
  core::RunningDigest digest_;
  std::uint64_t end_ = 0;      // of what is on its way to the disk
  std::size_t unstarted_ = 0;  // bytes behind it
  int error_ = 0;
};

// Removes what other saves of this path have left. What cannot be removed stays.
void RemoveTemporariesOf(const std::string& path) {
  namespace fs = std::filesystem;
  const std::string begin = fs::path(path).filename().string() + ".";
  std::error_code error;  // ends the loop
  for (fs::directory_iterator at(FolderOf(path), error), end; at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    const std::size_t length = begin.size() + kDigits + kTemporary.size();
    if (name.size() == length && name.starts_with(begin) && name.ends_with(kTemporary) &&
        IsNumberOfSave(std::string_view(name).substr(begin.size(), kDigits))) {
      unlink(at->path().c_str());
    }
  }
}

// So that the new name is on the disk too.
void SyncFolderOf(const std::string& path) {
  const std::string folder = FolderOf(path);
  const core::Descriptor descriptor(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (descriptor.get() < 0) Fail(folder, "cannot be opened", errno);
  // EINVAL: a file system that has no such thing.
  if (fsync(descriptor.get()) != 0 && errno != EINVAL) {
    Fail(folder, "cannot be synced to the disk", errno);
  }
}

}  // namespace

std::string MakeNumberOfSave() {
  std::random_device device;
  char digits[kDigits + 1];
  std::snprintf(digits, sizeof(digits), "%08x%08x", device(), device());
  return digits;
}

bool IsNumberOfSave(std::string_view text) {
  return text.size() == kDigits && text.find_first_not_of("0123456789abcdef") == text.npos;
}

NewCheckpointFile::NewCheckpointFile(std::string path, torch::serialize::OutputArchive& archive)
    : NewCheckpointFile(std::move(path), [&archive](const Sink& sink) { archive.save_to(sink); }) {}

NewCheckpointFile::NewCheckpointFile(std::string path,
                                     const std::function<void(const Sink&)>& write)
    : path_(std::move(path)),
      temporary_(path_ + "." + MakeNumberOfSave() + std::string(kTemporary)) {
  RemoveTemporariesOf(path_);  // before it has one: of two that begin at once, one stays
  file_ = core::Descriptor(open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file_.get() < 0) Fail(temporary_, "cannot be made", errno);
  try {
    ArchiveWriter writer(file_.get());
    write([&writer](const void* bytes, std::size_t count) -> std::size_t {
      return writer.Take(bytes, count);
    });
    const int error = writer.Finish();
    if (error != 0) Fail(temporary_, "cannot be written", error);
  } catch (...) {
    unlink(temporary_.c_str());
    throw;
  }
}

NewCheckpointFile::~NewCheckpointFile() {
  if (!path_.empty()) unlink(temporary_.c_str());
}

void NewCheckpointFile::Sync() {
  if (is_synced_) return;
  int error = fsync(file_.get()) == 0 ? 0 : errno;
  // Some file systems tell an error only when a descriptor is closed.
  const int close_error = core::Descriptor(fcntl(file_.get(), F_DUPFD_CLOEXEC, 0)).Close();
  if (error == 0) error = close_error;
  if (error != 0) Fail(temporary_, "cannot be written", error);
  is_synced_ = true;
}

void NewCheckpointFile::Replace() {
  Sync();
  if (rename(temporary_.c_str(), path_.c_str()) != 0) {
    if (errno != ENOENT) Fail(path_, "cannot be replaced", errno);
    throw std::runtime_error(path_ + ": is not replaced by this save: another one has begun, or " +
                             temporary_ + " was removed");
  }
  SyncFolderOf(std::exchange(path_, {}));
}

CheckpointReader::CheckpointReader(std::string path, core::Descriptor file, std::uint64_t size)
    : path_(std::move(path)), file_(std::move(file)), size_(size) {}

std::unique_ptr<CheckpointReader> CheckpointReader::Open(const std::string& path) {
  core::Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0 && errno == ENOENT) return nullptr;
  if (file.get() < 0) Fail(path, "cannot be opened", errno);
  struct stat facts {};
  if (fstat(file.get(), &facts) != 0) Fail(path, "cannot be read", errno);
  if (!S_ISREG(facts.st_mode)) throw std::runtime_error(path + ": is not a file");
  return std::unique_ptr<CheckpointReader>(
      new CheckpointReader(path, std::move(file), static_cast<std::uint64_t>(facts.st_size)));
}

std::uint64_t CheckpointReader::archive_size() const {
  return size_ < kTrailerBytes ? 0 : size_ - kTrailerBytes;
}

std::size_t CheckpointReader::Read(std::uint64_t offset, void* into, std::size_t count) const {
  std::size_t done = 0;
  while (done < count) {
    const ssize_t got = pread(file_.get(), static_cast<char*>(into) + done, count - done,
                              static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) Fail(path_, "cannot be read", errno);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return done;
}

void CheckpointReader::CheckSum() const {
  std::string trailer(kTrailerBytes, '\0');
  const std::uint64_t end = archive_size();
  if (Read(end, trailer.data(), trailer.size()) != kTrailerBytes || !trailer.starts_with(kMark)) {
    throw std::runtime_error(path_ + ": is cut off, or is not a checkpoint of Sirtaki");
  }
  core::RunningDigest digest;
  std::vector<char> window(std::size_t{1} << 18);  // stays in the second level cache
  for (std::uint64_t at = 0; at < end; at += window.size()) {
    const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(window.size(), end - at));
    if (Read(at, window.data(), wanted) != wanted) {
      throw std::runtime_error(path_ + ": became shorter while it was read");
    }
    digest.Add(window.data(), wanted);
  }
  if (TrailerOf(digest) != trailer) {
    throw std::runtime_error(path_ + ": is damaged: its checksum does not match its contents");
  }
}

void CheckpointReader::Load(torch::serialize::InputArchive* archive) const {
  archive->load_from([this](std::uint64_t offset, void* into,
                            std::size_t count) -> std::size_t { return Read(offset, into, count); },
                     [this]() -> std::size_t { return static_cast<std::size_t>(archive_size()); },
                     c10::kCPU);
}

// LibTorch reads the header of each file within the archive before it lets the file be read at once
// into the memory of its tensor, since it is stored as it is.
void CheckpointReader::LoadWithoutElements(torch::serialize::InputArchive* archive) {
  places_.clear();
  std::uint64_t header = size_;
  archive->load_from(
      [this, &header](std::uint64_t offset, void* into, std::size_t count) -> std::size_t {
        if (count == kHeaderBytes) header = offset;
        const bool is_file = offset > header && offset < header + kHeaderBytes + kMostOfName;
        if (count <= kHeaderBytes || !is_file || !IsTensor(header)) {
          return Read(offset, into, count);
        }
        places_[into] = offset;
        return count;
      },
      [this]() -> std::size_t { return static_cast<std::size_t>(archive_size()); }, c10::kCPU);
}

// Whether the header is that of a file with a tensor's elements, "NAME/data/0" and so on.
bool CheckpointReader::IsTensor(std::uint64_t header) const {
  std::array<unsigned char, kHeaderBytes> bytes{};
  if (Read(header, bytes.data(), bytes.size()) != bytes.size()) return false;
  if (std::memcmp(bytes.data(), "PK\3\4", 4) != 0) return false;
  std::string name(bytes[26] + 256U * bytes[27], '\0');
  return Read(header + kHeaderBytes, name.data(), name.size()) == name.size() &&
         name.find("/data/") != std::string::npos;
}

void CheckpointReader::ReadElements(const at::Tensor& from, const at::Tensor& to) const {
  if (to.nbytes() == 0) return;
  if (from.storage().nbytes() <= kHeaderBytes) {  // what is so small was read
    to.copy_(from);
    return;
  }
  const auto found = places_.find(from.storage().data());
  if (found == places_.end() || !from.is_contiguous() || !to.is_contiguous() || !to.is_cpu() ||
      from.nbytes() != to.nbytes()) {
    throw std::runtime_error(path_ + ": this LibTorch does not tell where a tensor's elements are");
  }
  const std::uint64_t begin = found->second + static_cast<std::uint64_t>(from.storage_offset()) *
                                                  static_cast<std::uint64_t>(from.itemsize());
  if (Read(begin, to.mutable_data_ptr(), to.nbytes()) != to.nbytes()) {
    throw std::runtime_error(path_ + ": became shorter while it was read");
  }
}

bool ReadCheckpointFile(const std::string& path, torch::serialize::InputArchive* archive) {
  const auto reader = CheckpointReader::Open(path);
  if (!reader) return false;
  reader->CheckSum();
  reader->Load(archive);
  return true;
}

}  // namespace sirtaki::detail

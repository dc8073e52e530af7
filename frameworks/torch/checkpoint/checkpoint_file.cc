#include "frameworks/torch/checkpoint/checkpoint_file.h"

#include <c10/core/Device.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <torch/serialize/archive.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/digest.h"

namespace sirtaki::detail {
namespace {

// The end of a ZIP file without a comment: a signature, 16 bytes, and the comment's length in the
// last two, lowest first. (PKWARE's APPNOTE.TXT, 4.3.16.)
constexpr std::size_t kEndBytes = 22;
constexpr std::string_view kEndSignature = {"PK\5\6", 4};
constexpr std::string_view kComment = "sirtaki checkpoint, checksum ";
constexpr std::size_t kDigits = 16;
constexpr std::size_t kCommentBytes = kComment.size() + kDigits;

// Of what is added, however it is cut: digests of blocks, each over the one before it.
class Checksum {
 public:
  void Add(std::string_view bytes) {
    while (!bytes.empty()) {
      const std::size_t taken = std::min(bytes.size(), block_.size() - filled_);
      std::memcpy(block_.data() + filled_, bytes.data(), taken);
      bytes.remove_prefix(taken);
      filled_ += taken;
      if (filled_ == block_.size()) Fold();
    }
  }
  std::string Comment() {
    if (filled_ > kWord) Fold();
    std::uint64_t hash = 0;
    std::memcpy(&hash, block_.data(), kWord);
    char digits[kDigits + 1];
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash));
    return std::string(kComment) + digits;
  }

 private:
  static constexpr std::size_t kWord = sizeof(std::uint64_t);

  // The digest so far is the block's first word.
  void Fold() {
    const std::uint64_t hash = core::Digest(block_.data(), filled_);
    std::memcpy(block_.data(), &hash, kWord);
    filled_ = kWord;
  }

  std::vector<char> block_ = std::vector<char>(std::size_t{64} << 10);
  std::size_t filled_ = kWord;
};

std::string Cause(int error) { return std::generic_category().message(error); }

[[noreturn]] void Fail(const std::string& path, const std::string& what, int error) {
  throw std::runtime_error(path + ": " + what + ": " + Cause(error));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { Close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return fd_; }
  // 0, or errno: some file systems report only now that a write has failed.
  int Close() {
    const int fd = std::exchange(fd_, -1);
    return fd < 0 || close(fd) == 0 ? 0 : errno;
  }

 private:
  int fd_;
};

// Writes an archive as it is made, and the checksum behind it.
class ArchiveWriter {
 public:
  explicit ArchiveWriter(int fd) : fd_(fd) {}

  // Never reports a failure to LibTorch, whose writer would end the process: it throws in its
  // destructor then. The first error is kept and what follows it dropped.
  std::size_t Take(const void* bytes, std::size_t count) {
    // The last bytes are held back: the length of the comment is among them.
    std::string_view rest(static_cast<const char*>(bytes), count);
    if (rest.size() >= kEndBytes) {
      Write(std::exchange(held_, std::string(rest.substr(rest.size() - kEndBytes))));
      Write(rest.substr(0, rest.size() - kEndBytes));
      return count;
    }
    held_ += rest;
    const std::size_t ready = held_.size() - std::min(held_.size(), kEndBytes);
    Write(std::string_view(held_).substr(0, ready));
    held_.erase(0, ready);
    return count;
  }

  // 0, or errno of the first failure.
  int Finish() {
    if (held_.size() != kEndBytes || held_.compare(0, kEndSignature.size(), kEndSignature) != 0) {
      throw std::runtime_error("this LibTorch's archives do not end as ZIP files do");
    }
    held_[kEndBytes - 2] = static_cast<char>(kCommentBytes);
    Write(held_);
    Write(checksum_.Comment());
    return error_;
  }

 private:
  void Write(std::string_view bytes) {
    checksum_.Add(bytes);
    while (error_ == 0 && !bytes.empty()) {
      const ssize_t written = write(fd_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) error_ = errno;
      if (written > 0) bytes.remove_prefix(static_cast<std::size_t>(written));
    }
  }

  const int fd_;
  std::string held_;
  Checksum checksum_;
  int error_ = 0;
};

// So that the new name is on the disk too.
void SyncFolderOf(const std::string& path) {
  std::string folder = std::filesystem::path(path).parent_path().string();
  if (folder.empty()) folder = ".";
  const Descriptor descriptor(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (descriptor.get() < 0) Fail(folder, "cannot be opened", errno);
  // EINVAL: a file system that has no such thing.
  if (fsync(descriptor.get()) != 0 && errno != EINVAL) {
    Fail(folder, "cannot be synced to the disk", errno);
  }
}

class FileReader {
 public:
  FileReader(std::string path, int fd, std::uint64_t size)
      : path_(std::move(path)), fd_(fd), size_(size) {}

  std::uint64_t size() const { return size_; }

  // Fewer only at the end of the file.
  std::size_t Read(std::uint64_t offset, void* into, std::size_t count) const {
    std::size_t done = 0;
    while (done < count) {
      const ssize_t got = pread(fd_, static_cast<char*>(into) + done, count - done,
                                static_cast<off_t>(offset + done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) Fail(path_, "cannot be read", errno);
      if (got == 0) break;
      done += static_cast<std::size_t>(got);
    }
    return done;
  }

  void CheckComment() const {
    std::string comment(kCommentBytes, '\0');
    const std::uint64_t end = size_ < kCommentBytes ? 0 : size_ - kCommentBytes;
    const std::size_t got = Read(end, comment.data(), comment.size());
    if (got != kCommentBytes || comment.compare(0, kComment.size(), kComment) != 0) {
      throw std::runtime_error(path_ + ": is cut off, or is not a checkpoint of Sirtaki");
    }
    Checksum checksum;
    std::vector<char> window(std::size_t{1} << 20);
    for (std::uint64_t at = 0; at < end;) {
      const auto wanted =
          static_cast<std::size_t>(std::min<std::uint64_t>(window.size(), end - at));
      if (Read(at, window.data(), wanted) != wanted) {
        throw std::runtime_error(path_ + ": became shorter while it was read");
      }
      checksum.Add({window.data(), wanted});
      at += wanted;
    }
    if (checksum.Comment() != comment) {
      throw std::runtime_error(path_ + ": is damaged: its checksum does not match its contents");
    }
  }

 private:
  const std::string path_;
  const int fd_;
  const std::uint64_t size_;
};

}  // namespace

std::string TemporaryOf(const std::string& path) { return path + ".tmp"; }

NewCheckpointFile::NewCheckpointFile(std::string path, torch::serialize::OutputArchive& archive)
    : path_(std::move(path)) {
  const std::string temporary = TemporaryOf(path_);
  if (unlink(temporary.c_str()) != 0 && errno != ENOENT && errno != ENOTDIR) {
    Fail(temporary, "cannot be removed", errno);
  }
  // Made anew, so that it is nobody else's file and no link.
  Descriptor file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file.get() < 0) Fail(temporary, "cannot be made", errno);
  try {
    ArchiveWriter writer(file.get());
    archive.save_to([&writer](const void* bytes, std::size_t count) -> std::size_t {
      return writer.Take(bytes, count);
    });
    int error = writer.Finish();
    if (error == 0 && fsync(file.get()) != 0) error = errno;
    const int close_error = file.Close();
    if (error == 0) error = close_error;
    if (error != 0) Fail(temporary, "cannot be written", error);
  } catch (...) {
    unlink(temporary.c_str());
    throw;
  }
}

NewCheckpointFile::~NewCheckpointFile() {
  if (!path_.empty()) unlink(TemporaryOf(path_).c_str());
}

void NewCheckpointFile::Replace() {
  if (rename(TemporaryOf(path_).c_str(), path_.c_str()) != 0) {
    Fail(path_, "cannot be replaced", errno);
  }
  SyncFolderOf(std::exchange(path_, {}));
}

bool ReadCheckpointFile(const std::string& path, torch::serialize::InputArchive* archive) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0 && errno == ENOENT) return false;
  if (file.get() < 0) Fail(path, "cannot be opened", errno);
  struct stat facts {};
  if (fstat(file.get(), &facts) != 0) Fail(path, "cannot be read", errno);
  if (!S_ISREG(facts.st_mode)) throw std::runtime_error(path + ": is not a file");
  const FileReader reader(path, file.get(), static_cast<std::uint64_t>(facts.st_size));
  reader.CheckComment();
  archive->load_from(
      [&reader](std::uint64_t offset, void* into, std::size_t count) -> std::size_t {
        return reader.Read(offset, into, count);
      },
      [&reader]() -> std::size_t { return static_cast<std::size_t>(reader.size()); }, c10::kCPU);
  return true;
}

}  // namespace sirtaki::detail

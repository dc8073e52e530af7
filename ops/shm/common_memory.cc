#include "ops/shm/common_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/base/types.h"

namespace sirtaki::ops::shm {

using core::Status;
using core::StatusCode;

namespace {

// The table says of a page that it is there or swapped out, and that it is a file's or shared
// (Documentation/admin-guide/mm/pagemap.rst of Linux).
constexpr std::uint64_t kSomewhere = (std::uint64_t{1} << 63) | (std::uint64_t{1} << 62);
constexpr std::uint64_t kOfFile = std::uint64_t{1} << 61;

// The size has a page more than the memory, for the token.
std::int64_t SizeFor(std::int64_t bytes) { return core::RoundUp(bytes, PageSize()) + PageSize(); }

}  // namespace

Status CommonMemory::Create(std::int64_t bytes, std::shared_ptr<CommonMemory>* memory) {
  std::shared_ptr<Region> region;
  Status status = Region::Create("sirtaki parameters", SizeFor(bytes), &region);
  if (!status.ok()) return status;
  Name name;
  name.process = getpid();
  name.descriptor = region->descriptor();
  if (getrandom(&name.token, sizeof(name.token), 0) != sizeof(name.token)) {
    return RefusedBySystem("cannot get random bytes (getrandom)");
  }
  std::shared_ptr<CommonMemory> made(new CommonMemory(std::move(region), name));
  std::memcpy(made->common() + made->last_page(), &name.token, sizeof(name.token));
  status = made->MapOwn();
  if (status.ok()) *memory = std::move(made);
  return status;
}

Status CommonMemory::Open(const Name& name, std::int64_t bytes,
                          std::shared_ptr<CommonMemory>* memory) {
  std::shared_ptr<Region> region;
  Status status = Region::Open(static_cast<pid_t>(name.process), static_cast<int>(name.descriptor),
                               SizeFor(bytes), &region);
  if (!status.ok()) return status;
  std::shared_ptr<CommonMemory> made(new CommonMemory(std::move(region), name));
  if (std::memcmp(made->common() + made->last_page(), &name.token, sizeof(name.token)) != 0) {
    return {StatusCode::kUnsupported, "it is not the memory of a rank of this job"};
  }
  status = made->MapOwn();
  if (status.ok()) *memory = std::move(made);
  return status;
}

Status CommonMemory::MapOwn() {
  const std::string path =
      "/proc/" + std::to_string(name_.process) + "/fd/" + std::to_string(name_.descriptor);
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return RefusedBySystem("cannot open " + path);
  void* const own = mmap(nullptr, static_cast<std::size_t>(region_->size()), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_NORESERVE, file, 0);
  const Status mapped =
      own == MAP_FAILED
          ? RefusedBySystem("cannot map " + std::to_string(region_->size()) + " bytes")
          : Status::Ok();
  close(file);
  if (!mapped.ok()) return mapped;
  own_ = static_cast<std::byte*>(own);
  AddToFork(*this);
  pages_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pages_ < 0) return RefusedBySystem("cannot open /proc/self/pagemap");
  // A system that does not say which pages are copies, or says it wrongly, is found out here.
  volatile auto* const token = reinterpret_cast<volatile std::int64_t*>(own_ + last_page());
  std::vector<Range> written;
  static_cast<void>(*token);
  Status status = FindWritten(&written);
  bool right = status.ok() && written.empty();
  *token = *token;
  if (status.ok()) status = FindWritten(&written);
  right = right && status.ok() && written.size() == 1 && written.front().begin == last_page();
  if (right) LetGo(written.front());
  if (status.ok()) status = FindWritten(&written);
  right = right && status.ok() && written.empty();
  if (status.ok() && !right) {
    status = {StatusCode::kUnsupported, "the system does not tell which pages were written"};
  }
  return status;
}

CommonMemory::~CommonMemory() {
  RemoveFromFork(*this);
  if (own_ != nullptr) munmap(own_, static_cast<std::size_t>(region_->size()));
  if (pages_ >= 0) close(pages_);
}

Status CommonMemory::FindWritten(std::vector<Range>* written) const {
  written->clear();
  const std::int64_t page = PageSize();
  const std::int64_t pages = region_->size() / page;
  const std::int64_t first =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(own_)) / page;
  constexpr std::int64_t kAtOnce = 16384;
  std::vector<std::uint64_t> table(static_cast<std::size_t>(std::min(pages, kAtOnce)));
  for (std::int64_t p = 0; p < pages;) {
    const auto wanted =
        static_cast<std::size_t>(std::min(pages - p, kAtOnce)) * sizeof(std::uint64_t);
    const ssize_t read =
        pread(pages_, table.data(), wanted,
              static_cast<off_t>((first + p) * static_cast<std::int64_t>(sizeof(std::uint64_t))));
    const std::int64_t found = read / static_cast<std::int64_t>(sizeof(std::uint64_t));
    if (found <= 0) return RefusedBySystem("cannot read /proc/self/pagemap");
    for (std::int64_t i = 0; i < found; ++i) {
      const std::uint64_t entry = table[static_cast<std::size_t>(i)];
      if ((entry & kSomewhere) == 0 || (entry & kOfFile) != 0) continue;
      const std::int64_t begin = (p + i) * page;
      const std::int64_t end = begin + page;
      if (!written->empty() && written->back().end == begin) {
        written->back().end = end;
      } else {
        written->push_back({begin, end});
      }
    }
    p += found;
  }
  return Status::Ok();
}

void CommonMemory::BeforeFork() {
  if (own_ == nullptr || in_child_) return;
  const auto size = static_cast<std::size_t>(region_->size());
  snapshot_ = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (snapshot_ != MAP_FAILED) std::memcpy(snapshot_, own_, size);
}

void CommonMemory::AfterForkInParent() {
  if (snapshot_ == nullptr) return;
  if (snapshot_ == MAP_FAILED) {
    WarnOfFork();
  } else {
    munmap(snapshot_, static_cast<std::size_t>(region_->size()));
  }
  snapshot_ = nullptr;
}

void CommonMemory::AfterForkInChild() {
  if (snapshot_ == nullptr) return;
  const auto size = static_cast<std::size_t>(region_->size());
  if (snapshot_ != MAP_FAILED) {
    mremap(snapshot_, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, own_);
  }
  snapshot_ = nullptr;
  in_child_ = true;
}

void CommonMemory::LetGo(const Range& pages) {
  std::byte* const begin = own_ + pages.begin;
  const auto size = static_cast<std::size_t>(pages.end - pages.begin);
  if (madvise(begin, size, MADV_DONTNEED) == 0) return;
  // The program has locked them in memory, and would go on with old numbers.
  static_cast<void>(munlock(begin, size));
  static_cast<void>(madvise(begin, size, MADV_DONTNEED));
}

}  // namespace sirtaki::ops::shm

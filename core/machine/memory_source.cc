#include "core/machine/memory_source.h"

#include <algorithm>
#include <new>

namespace sirtaki::core {

namespace {

class Heap final : public MemorySource {
 public:
  std::shared_ptr<void> Allocate(std::int64_t bytes) override {
    constexpr std::align_val_t kAligned{kAlignment};
    const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
    return {::operator new(size, kAligned),
            [](void* memory) { ::operator delete(memory, kAligned); }};
  }
  bool Contains(const void* /*memory*/) const override { return true; }
};

}  // namespace

MemorySource& PlainMemory() {
  static Heap heap;
  return heap;
}

}  // namespace sirtaki::core

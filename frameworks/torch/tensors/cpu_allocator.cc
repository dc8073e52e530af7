#include "frameworks/torch/tensors/cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <array>
#include <atomic>

#include "session/base/process_pool.h"

namespace sirtaki::detail {

namespace {

// One for the process, never destroyed. It always gives the same deleter, with the memory itself as
// the context, as raw_deleter() promises.
class PoolAllocator final : public at::Allocator {
 public:
  explicit PoolAllocator(at::Allocator& before)
      : before_(before), deleter_before_(before.raw_deleter()) {}

  at::DataPtr allocate(std::size_t bytes) override {
    void* const memory = Take(bytes);
    return {memory, memory, &Free, at::Device(at::DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void Use(ops::shm::Pool* pool) {
    for (std::atomic<ops::shm::Pool*>& known : known_) {
      if (pool == nullptr || known.load() == pool) break;
      if (known.load() != nullptr) continue;
      known.store(pool);
      break;
    }
    current_.store(pool);
  }

  static PoolAllocator*& Installed() {
    static PoolAllocator* installed = nullptr;
    return installed;
  }

 private:
  void* Take(std::size_t bytes) {
    ops::shm::Pool* const pool = current_.load(std::memory_order_acquire);
    // Negative sizes, which come here as huge ones, are refused by the other.
    const bool fits = bytes <= std::numeric_limits<std::int64_t>::max();
    if (pool != nullptr && bytes >= kPoolTensorBytes && fits) {
      if (void* const memory = pool->TryAllocate(static_cast<std::int64_t>(bytes))) {
        c10::profiledCPUMemoryReporter().New(memory, bytes);
        return memory;
      }
    }
    return before_.raw_allocate(bytes);
  }

  static void Free(void* memory) {
    const PoolAllocator& self = *Installed();
    for (const std::atomic<ops::shm::Pool*>& known : self.known_) {
      ops::shm::Pool* const pool = known.load(std::memory_order_acquire);
      if (pool == nullptr || !pool->Contains(memory)) continue;
      c10::profiledCPUMemoryReporter().Delete(memory);
      return pool->Free(memory);
    }
    self.deleter_before_(memory);
  }

  at::Allocator& before_;
  const at::DeleterFnPtr deleter_before_;
  std::atomic<ops::shm::Pool*> current_{nullptr};
  // The shared one of the process and its own.
  std::array<std::atomic<ops::shm::Pool*>, 2> known_{};
};

}  // namespace

std::shared_ptr<ops::shm::Pool> PoolForTensors(session::Session& session) {
  const core::Config& config = session.config();
  if (config.allocator == core::AllocatorMode::kOff) return nullptr;
  const int local_size = session.topology().local_size;
  if (local_size > 1) {
    const auto shared = session::PoolOfProcess(config, local_size);
    // Whether the session has found that the ranks see each other's memory.
    const bool is_used = session.HasPool() && shared && session.IsShared(shared->region().base());
    if (is_used) return shared;
  }
  return session::PrivatePoolOfProcess(config, local_size);
}

bool TakeCpuTensorsFrom(ops::shm::Pool* pool, bool before_own) {
  PoolAllocator*& installed = PoolAllocator::Installed();
  if (installed == nullptr) {
    if (pool == nullptr) return true;
    at::Allocator* const before = c10::GetCPUAllocator();
    if (before != c10::GetDefaultCPUAllocator() && !before_own) return false;
    if (before->raw_deleter() == nullptr) return false;
    installed = new PoolAllocator(*before);
    // One of a higher priority stays; of the same, who comes last.
    c10::SetCPUAllocator(installed);
  }
  installed->Use(pool);
  return pool == nullptr || c10::GetCPUAllocator() == installed;
}

}  // namespace sirtaki::detail

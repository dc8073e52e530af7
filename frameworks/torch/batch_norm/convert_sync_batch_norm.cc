#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "frameworks/torch/batch_norm/sync_batch_norm_impl.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/sync_batch_norm.h"

namespace sirtaki {

// Looks at the whole module first and changes it only if every BatchNorm in it can be replaced.
class SyncBatchNormConverter {
 public:
  explicit SyncBatchNormConverter(ProcessSet process_set) : process_set_(std::move(process_set)) {}

  // `path` is empty for the module that the caller gave.
  void Look(torch::nn::Module& module, const std::string& path);
  std::int64_t Convert();
  bool met_converted() const { return met_converted_; }

 private:
  // One BatchNorm, and everywhere in the module where it is referred to.
  struct Found {
    const torch::nn::Module* module = nullptr;
    std::string path;  // the first
    std::vector<std::pair<torch::nn::SequentialImpl*, std::string>> children;
    std::vector<torch::nn::AnyModule*> elements;
  };

  Found& FoundOf(const std::shared_ptr<torch::nn::Module>& module, const std::string& path);
  void LookAt(torch::nn::Module& parent, const std::string& key, const std::string& path,
              const std::shared_ptr<torch::nn::Module>& child);
  template <class BatchNorm>
  std::shared_ptr<SyncBatchNormImpl> TryMake(const Found& found) const;
  std::shared_ptr<SyncBatchNormImpl> Make(const Found& found) const;
  static std::string WhyNot(const Found& found);

  const ProcessSet process_set_;
  std::unordered_set<const torch::nn::Module*> seen_;
  std::vector<Found> found_;
  bool met_converted_ = false;
};

namespace {

using torch::nn::BatchNorm1dImpl;
using torch::nn::BatchNorm2dImpl;
using torch::nn::BatchNorm3dImpl;

bool IsBatchNorm(const torch::nn::Module& module) {
  return module.as<BatchNorm1dImpl>() || module.as<BatchNorm2dImpl>() ||
         module.as<BatchNorm3dImpl>();
}

bool IsDerived(const torch::nn::Module& module) {
  const std::type_info& type = typeid(module);
  return type != typeid(BatchNorm1dImpl) && type != typeid(BatchNorm2dImpl) &&
         type != typeid(BatchNorm3dImpl);
}

}  // namespace

SyncBatchNormConverter::Found& SyncBatchNormConverter::FoundOf(
    const std::shared_ptr<torch::nn::Module>& module, const std::string& path) {
  auto known = std::find_if(found_.begin(), found_.end(),
                            [&](const Found& found) { return found.module == module.get(); });
  if (known == found_.end()) {
    Found found;
    found.module = module.get();
    found.path = path;
    known = found_.insert(known, std::move(found));
  }
  return *known;
}

void SyncBatchNormConverter::LookAt(torch::nn::Module& parent, const std::string& key,
                                    const std::string& path,
                                    const std::shared_ptr<torch::nn::Module>& child) {
  Found& found = FoundOf(child, path);
  auto* sequential = parent.as<torch::nn::SequentialImpl>();
  if (!sequential) return;  // and so this reference counts among those of others
  found.children.emplace_back(sequential, key);
  for (torch::nn::AnyModule& element : *sequential) {
    const bool noted =
        std::find(found.elements.begin(), found.elements.end(), &element) != found.elements.end();
    if (element.ptr() == child && !noted) found.elements.push_back(&element);
  }
}

void SyncBatchNormConverter::Look(torch::nn::Module& module, const std::string& path) {
  if (!seen_.insert(&module).second) return;
  for (const auto& item : module.named_children()) {
    const std::string child_path = path.empty() ? item.key() : path + "." + item.key();
    torch::nn::Module& child = *item.value();
    met_converted_ |= child.as<SyncBatchNormImpl>() != nullptr;
    if (IsBatchNorm(child)) {
      LookAt(module, item.key(), child_path, item.value());
    } else {
      Look(child, child_path);
    }
  }
}

// Empty if it can be replaced.
std::string SyncBatchNormConverter::WhyNot(const Found& found) {
  if (IsDerived(*found.module)) {
    return "\"" + found.path + "\" is of a class derived from BatchNorm (use or derive from " +
           "sirtaki::SyncBatchNormImpl instead)";
  }
  if (found.elements.empty()) {
    return "\"" + found.path +
           "\" is not an element of a Sequential, so its caller has fixed its " +
           "type (declare it as sirtaki::SyncBatchNorm, or hold it in a Sequential)";
  }
  // A weak reference does not count, and this one is not kept.
  const long others = found.module->weak_from_this().use_count() -
                      static_cast<long>(found.children.size() + found.elements.size());
  if (others > 0) {
    return "\"" + found.path + "\" is held by something besides its Sequential, which would keep " +
           "the old one (release it there, or declare it as sirtaki::SyncBatchNorm)";
  }
  return {};
}

template <class BatchNorm>
std::shared_ptr<SyncBatchNormImpl> SyncBatchNormConverter::TryMake(const Found& found) const {
  const auto* from = found.module->as<BatchNorm>();
  if (!from) return nullptr;
  const detail::SyncBatchNormTensors tensors = {from->weight, from->bias, from->running_mean,
                                                from->running_var, from->num_batches_tracked};
  // make_shared cannot call the constructor, which is private.
  std::shared_ptr<SyncBatchNormImpl> made(
      new SyncBatchNormImpl(from->options, tensors, process_set_, found.path));
  made->train(from->is_training());
  return made;
}

std::shared_ptr<SyncBatchNormImpl> SyncBatchNormConverter::Make(const Found& found) const {
  auto made = TryMake<BatchNorm1dImpl>(found);
  if (!made) made = TryMake<BatchNorm2dImpl>(found);
  if (!made) made = TryMake<BatchNorm3dImpl>(found);
  return made;
}

std::int64_t SyncBatchNormConverter::Convert() {
  std::string refused;
  for (const Found& found : found_) {
    const std::string why = WhyNot(found);
    if (!why.empty()) refused += (refused.empty() ? "" : "; ") + why;
  }
  if (!refused.empty()) {
    detail::ThrowInvalid("convert_sync_batchnorm changed nothing: " + refused);
  }
  std::vector<std::shared_ptr<SyncBatchNormImpl>> made;
  made.reserve(found_.size());
  for (const Found& found : found_) made.push_back(Make(found));
  for (std::size_t i = 0; i < found_.size(); ++i) {
    for (const auto& [parent, key] : found_[i].children) parent->replace_module(key, made[i]);
    for (torch::nn::AnyModule* element : found_[i].elements) {
      *element = torch::nn::AnyModule(made[i]);
    }
  }
  return static_cast<std::int64_t>(found_.size());
}

std::int64_t convert_sync_batchnorm(torch::nn::Module& module, const ProcessSet& process_set) {
  if (IsBatchNorm(module)) {
    detail::ThrowInvalid(
        "convert_sync_batchnorm was given a BatchNorm itself, which "
        "cannot be replaced; make a sirtaki::SyncBatchNorm instead");
  }
  SyncBatchNormConverter converter(process_set);
  converter.Look(module, "");
  const std::int64_t count = converter.Convert();
  if (count == 0 && !converter.met_converted()) {
    SIRTAKI_LOG(kWarning, "convert_sync_batchnorm found no BatchNorm to convert");
  }
  return count;
}

}  // namespace sirtaki

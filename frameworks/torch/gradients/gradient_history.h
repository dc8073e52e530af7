// What has become of a parameter's `.grad` before: whether there was none, and whether it holds an
// average, to which passes may have added.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <optional>

namespace sirtaki::detail {

// Thread-safe: hooks of several backward() call it at once, and the thread that uses the optimizer.
class GradientHistory {
 public:
  // A backward() is about to write `gradient`. `later`: an average of this step was put there,
  // whatever the program has made of it. `also_changed`: it counts as an average where the program
  // has changed it since. True if the backward() adds to an average.
  bool BeginPass(const at::Tensor& gradient, bool later, bool also_changed = false);
  // The backward() has written it, and other passes are to come.
  void EndPass(const at::Tensor& gradient);
  // No pass is to come. `touched`: one has come since the last average; else `averaged`: the gradient
  // of this step was averaged before. True if `gradient` is an average, or one with something added.
  bool EndPasses(const at::Tensor& gradient, bool touched, bool averaged);
  // An average was put there; undefined: none was.
  void NoteAverage(const at::Tensor& gradient);
  // None is there: the program has zeroed it in a way that autograd does not see, as torch's foreach
  // functions do on a GPU.
  void ForgetAverage();
  void ForgetPasses();

  // The last pass has made the gradient, and not added to one.
  bool fresh() const;
  bool on_average() const;
  bool has_average() const;
  // The program has not changed `.grad` since it was noted last, as far as autograd knows: clipping by
  // LibTorch's own functions leaves no trace.
  bool Holds(const at::Tensor& gradient) const;

 private:
  // The weak pointer keeps its address from being another's.
  using WeakImpl = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Average {
    WeakImpl gradient;
    std::int64_t version = 0;
  };
  bool IsNoted(const at::Tensor& gradient, bool also_changed) const;
  void Note(const at::Tensor& gradient);

  mutable std::mutex mutex_;  // guards what follows
  std::optional<Average> average_;
  bool fresh_ = false;
  bool on_average_ = false;  // it holds an average, to which passes may have added
};

}  // namespace sirtaki::detail

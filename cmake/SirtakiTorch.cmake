# LibTorch through our own find module; see FindLibTorch.cmake for where it looks.
set(SIRTAKI_HAVE_TORCH OFF)
if(SIRTAKI_TORCH STREQUAL "OFF")
  set(sirtaki_torch_status "off: SIRTAKI_TORCH=OFF")
else()
  find_package(LibTorch 2.1 QUIET)
  if(LibTorch_FOUND)
    set(SIRTAKI_HAVE_TORCH ON)
    set(sirtaki_torch_status "${LibTorch_BUILD}, ${LibTorch_ROOT_DIR}")
  elseif(SIRTAKI_TORCH STREQUAL "ON")
    message(FATAL_ERROR "SIRTAKI_TORCH=ON, but ${LibTorch_WHY_NOT}. 'bash bootstrap.sh' installs one into .venv, or "
      "give your own in CMAKE_PREFIX_PATH (an unpacked libtorch, or torch.utils.cmake_prefix_path).")
  else()
    set(sirtaki_torch_status "off: ${LibTorch_WHY_NOT}")
  endif()
endif()

# Under a sanitizer most of the compiler's time goes into instrumented copies of LibTorch's templates; optimising them
# costs a third of it and buys nothing, for LibTorch's own library is as it is.
function(sirtaki_sanitize_quickly target)
  if(SIRTAKI_SANITIZE)
    target_compile_options(${target} PRIVATE -O0)
  endif()
endfunction()

# sirtaki_precompile_torch(<library>): <torch/torch.h> costs about 20 s a source file; here it is parsed once.
# sirtaki_reuse_torch_pch(<target> <library>): and used by others, whose flags must agree with the library's.
function(sirtaki_precompile_torch library)
  sirtaki_sanitize_quickly(${library})
  if(SIRTAKI_PCH AND NOT SIRTAKI_CLANG_TIDY)
    if(EXISTS "${PROJECT_SOURCE_DIR}/frameworks/torch/pch.h")
      target_precompile_headers(${library} PRIVATE "${PROJECT_SOURCE_DIR}/frameworks/torch/pch.h")
    else()
      target_precompile_headers(${library} PRIVATE <torch/torch.h>)
    endif()
  endif()
endfunction()

function(sirtaki_reuse_torch_pch target library)
  sirtaki_sanitize_quickly(${target})
  if(SIRTAKI_PCH AND NOT SIRTAKI_CLANG_TIDY)
    target_precompile_headers(${target} REUSE_FROM ${library})
    target_compile_options(${target} PRIVATE -fPIC)   # a program's own -fPIE would make the compiler refuse it
  endif()
endfunction()

from .noise import check_noise as check_noise
